"""The ledger: what the compiler made of a list of Triton kernels under their default schedules.

``ledger_list.subjects()`` is the list, ``Ledger`` the committed file, ``measure`` compiles what changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from kvgen.backends.triton.backend import TritonBackend
from kvgen.backends.triton.kernel import sources
from kvgen.backends.triton.process import toolchain_id
from kvgen.errors import UnsupportedError
from kvgen.passes.code_only import python_code
from tests.support.ledger_list import GPUS, Subject

PATH = Path(__file__).resolve().parents[1] / "backends" / "triton" / "ledger.json"
COMMAND = "pytest tests/backends/triton/test_ledger.py --update-ledger"
REFUSED = "refused"
"""The ``source`` of what a target refuses. The words of the refusal are no part of it."""


@dataclass
class Entry:
    """What is known of a subject."""

    source: str
    """Hash of everything that decides its machine code but the compiler; or ``REFUSED``."""
    kernels: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Facts of each compiled kernel by name."""


@cache
def source_of(subject: Subject) -> str:
    """``Entry.source`` of the project as it is; comments and docstrings are no part of it."""
    try:
        plan = subject.plan
    except UnsupportedError:
        return REFUSED
    parts = sources(plan, python_code(TritonBackend().render(plan)))
    keys = "".join(part.key(subject.target, "") for part in parts)
    return hashlib.sha256(keys.encode()).hexdigest()[:16]


@dataclass
class Ledger:
    """The committed file."""

    compiler: str
    entries: dict[str, Entry]

    @classmethod
    def read(cls, path: Path = PATH) -> Ledger:
        """The file's content; an empty ledger where there is none."""
        if not path.exists():
            return cls("", {})
        raw = json.loads(path.read_text())
        return cls(raw["compiler"], {n: Entry(e.pop("source"), e) for n, e in raw["entries"].items()})

    def write(self, path: Path = PATH) -> None:
        """One line an entry, sorted."""
        lines = [
            f"  {json.dumps(name)}: {json.dumps({'source': entry.source, **entry.kernels})}"
            for name, entry in sorted(self.entries.items())
        ]
        body = ",\n".join(lines)
        path.write_text(f'{{\n "compiler": {json.dumps(self.compiler)},\n "entries": {{\n{body}\n }}\n}}\n')

    def stale(self, listed: Mapping[str, Subject]) -> list[str]:
        """Names whose source is another now, or that are missing."""
        return [
            n for n, s in listed.items() if n not in self.entries or self.entries[n].source != source_of(s)
        ]


def compiler() -> str:
    """What compiles here."""
    return toolchain_id(sys.executable)


def measure(
    listed: Mapping[str, Subject], tell: Callable[[str], None] = lambda text: None
) -> dict[str, Entry]:
    """Compile subjects, all kernels of a target at once on all cores, and read their binaries."""
    found = {name: Entry(source_of(subject)) for name, subject in listed.items()}
    backend = TritonBackend()
    for target in GPUS:
        own = {n: s for n, s in listed.items() if s.target == target and found[n].source != REFUSED}
        for names in _batches(list(own), 4 * (os.cpu_count() or 1)):
            for name, kernel in zip(names, backend.compile([own[n].plan for n in names]), strict=True):
                limits = {part.kernel: part.maxnreg for part in kernel.parts}
                found[name].kernels = {n: _facts(f, limits[n]) for n, f in kernel.resources().items()}
            tell(f"{len(names)} more for {target}, up to {names[-1]}")
    return found


def _batches(names: list[str], size: int) -> Iterable[list[str]]:
    return (names[i : i + size] for i in range(0, len(names), size))


def _facts(found: Mapping[str, Any], limit: int | None) -> dict[str, Any]:
    """The facts that are kept: few, so that a changed kernel reads as one changed line."""
    loop = found.get("loop", {})
    facts = {
        "registers": found["registers"],
        "spilled": int(found["spill_bytes"]) + 4 * int(found["spilled_registers"]),
        "shared": found["shared_bytes"],
        "loop": loop.get("instructions", 0),
    }
    if limit is not None:
        facts["limit"] = limit
    if narrow := loop.get("narrow_loads"):
        facts["narrow"] = dict(narrow)
    return facts
