"""The commands of ``kvgen``: one small file each, listed in ``kvgen.cli``.

A command reads its options, builds one plain value of everything it has to say, and prints that value:
as JSON with ``--json``, as tables on a terminal, as plain aligned lines elsewhere. Only typer is imported
before a command runs; each command imports what it needs inside.
"""
