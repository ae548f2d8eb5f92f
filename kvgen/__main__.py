"""``python -m kvgen``: the same as the ``kvgen`` command."""

from kvgen.cli import main

main()
