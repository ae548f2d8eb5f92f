"""The standard streams a command can rely on, whatever the caller closed or filled up."""

from __future__ import annotations

import os
import sys


def open_missing() -> None:
    """Let what the caller closed (``>&-``) lead to nowhere.

    Python has None for such a stream, and the next file that is opened would get its number: what a library
    or a child prints would end in that file.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            _lead_nowhere(number)
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 - for the process
            setattr(sys, name, stream)


def discard_output() -> None:
    """Let standard output lead to nowhere: what is buffered can't be written, and Python tries at exit."""
    _lead_nowhere(sys.stdout.fileno())


def _lead_nowhere(number: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere == number:
        os.set_inheritable(number, True)
    else:
        os.dup2(nowhere, number)
        os.close(nowhere)
