"""Fault: one planted fault. ``kernel`` makes those of rendered text, ``behaviour`` those of a Python name."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Replacement = str | Callable[[re.Match[str]], str]

TOUCHED = "KVGEN_MUTANT_TOUCHED"
"""Environment: a file that a fault makes when code that it changed is rendered or called."""

HEADERS = {
    "cpp": re.compile(r"^// kvgen (\w+)", re.M),
    "triton": re.compile(r'\A\s*"""(\w+): '),
}
"""How the text of a kernel says which op it is."""


@dataclass(frozen=True)
class Fault:
    """What is wrong, and who must notice."""

    name: str
    says: str
    """One sentence: what the code does now."""
    caught_by: str
    """The node id of a test that must fail; a function without its parameters stands for all of them."""
    plant: Callable[[], None]


FAULTS: dict[str, Fault] = {}


def touched() -> None:
    """Note that the faulty code is in use in this process."""
    if os.environ.get(TOUCHED):
        Path(os.environ[TOUCHED]).touch()


def _enter(fault: Fault) -> None:
    if fault.name in FAULTS:
        raise ValueError(f"two faults are called {fault.name}")
    FAULTS[fault.name] = fault


def kernel(name: str, says: str, ops: str, find: str, replace: Replacement, caught_by: str) -> None:
    """Enter a fault of rendered text: in each kernel of ``ops`` ("cpp decode prefill": the language, then op
    names) every match of the pattern ``find`` becomes ``replace`` (as for ``re.sub``)."""
    language, *wanted = ops.split()

    def plant() -> None:
        import jinja2

        plain = jinja2.Template.render

        def render(self: jinja2.Template, *args: Any, **values: Any) -> str:
            text = plain(self, *args, **values)
            header = HEADERS[language].search(text)
            if header is None or header[1] not in wanted:
                return text
            text, count = re.subn(find, replace, text)
            if count:
                touched()
            return text

        jinja2.Template.render = render  # type: ignore[method-assign]

    _enter(Fault(name, says, caught_by, plant))


def behaviour(
    name: str, says: str, where: str, caught_by: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a fault of what ``where`` ("kvgen.runtime.pool:PagePool.release") does. The decorated function
    gets the plain one and the call's arguments. Every module that has imported the name sees the fault."""
    module_name, _, path = where.partition(":")

    def decorate(faulty: Callable[..., Any]) -> Callable[..., Any]:
        def plant() -> None:
            owner: Any = importlib.import_module(module_name)
            *owners, last = path.split(".")
            for part in owners:
                owner = getattr(owner, part)
            plain = vars(owner)[last]
            call = plain.fget if isinstance(plain, property) else plain

            def changed(*args: Any, **values: Any) -> Any:
                touched()
                return faulty(call, *args, **values)

            setattr(owner, last, property(changed) if isinstance(plain, property) else changed)
            for module in list(sys.modules.values()):  # those that have imported the name already
                if vars(module).get(last) is plain:
                    setattr(module, last, changed)

        _enter(Fault(name, says, caught_by, plant))
        return faulty

    return decorate
