"""folder: what a prepared folder holds: a sealed manifest, and the cubins that it vouches for.

::

    DIR/manifest.json      specs, page records, candidates with plans, arguments, predictions; its own sha256
    DIR/cubin/<sha>.cubin  each binary once
    DIR/result.json        what a run on a GPU found
    DIR/autotune_cache/    the records that it came to
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvgen import bounded, paths, trust
from kvgen.backends.triton.cubin import Part
from kvgen.errors import ToolchainError, brief
from kvgen.gpu_check.recorded import Recorded, from_json
from kvgen.ir import PageRecord, Schedule, Spec
from kvgen.ir.verify import VerifyError, verify_record
from kvgen.runtime.manifest import MOST_MANIFEST, NAME, File, sealed

SCHEMA = 1
"""Version of the manifest's fields."""

PREPARE = "prepare the folder again: kvgen bench --gpu-check DIR --prepare --target sm_90 SPEC..."


@dataclass(frozen=True)
class Binary:
    """One kernel of a candidate."""

    name: str
    signature: tuple[tuple[str, str], ...]
    num_warps: int
    shared: int
    scratch: int
    file: File

    def part(self, folder: Path) -> Part:
        """What the launcher takes; the file is read and compared with what was prepared."""
        cubin = self.file.content(folder)
        return Part(self.name, self.signature, self.num_warps, self.shared, self.scratch, cubin)


@dataclass(frozen=True)
class Candidate:
    """One schedule of one op and variant, compiled."""

    plan: Recorded
    default: bool
    """Whether it is the default schedule."""
    predicted: float | None
    """The model's figure, smaller is better; None where it was not ranked."""
    binaries: tuple[Binary, ...]

    @property
    def schedule(self) -> Schedule:
        """Its schedule."""
        return self.plan.schedule


@dataclass(frozen=True)
class Prepared:
    """One spec of the folder."""

    spec: Spec
    record: PageRecord
    digests: Mapping[str, tuple[str, str]]
    """By op, the digests of the templates and of the schedule space that it was compiled from."""
    candidates: tuple[Candidate, ...]

    def of(self, op: str, variant: str = "") -> list[Candidate]:
        """Candidates of an op and variant (empty: what a library compiles first), the default first."""
        own = [c for c in self.candidates if c.plan.op == op]
        wanted = variant or (own[0].plan.variant if own else "")
        return sorted((c for c in own if c.plan.variant == wanted), key=lambda c: not c.default)


@dataclass(frozen=True)
class Manifest:
    """All that a prepared folder holds."""

    kvgen: str
    target: str
    toolchain: str
    prepared: tuple[Prepared, ...]


def write(folder: Path, manifest: Manifest, plans: Mapping[int, Mapping[str, Any]]) -> Path:
    """Write the manifest; ``plans``: the JSON form of each candidate's plan, by the candidate's ``id``."""
    body = {
        "schema": SCHEMA,
        "kvgen": manifest.kvgen,
        "target": manifest.target,
        "toolchain": manifest.toolchain,
        "prepared": [
            {
                "spec": prepared.spec.to_dict(),
                "record": prepared.record.to_dict(),
                "digests": {op: list(pair) for op, pair in prepared.digests.items()},
                "candidates": [
                    {
                        "plan": plans[id(candidate)],
                        "default": candidate.default,
                        "predicted": candidate.predicted,
                        "binaries": [asdict(binary) for binary in candidate.binaries],
                    }
                    for candidate in prepared.candidates
                ],
            }
            for prepared in manifest.prepared
        ],
    }
    path = folder / NAME
    paths.write_atomic(path, json.dumps(sealed(body), indent=1, sort_keys=True) + "\n")
    return path


def read(folder: Path) -> Manifest:
    """The manifest of a prepared folder; ``ToolchainError`` says what is wrong with it."""
    path = folder / NAME
    try:
        trust.require(path)
        found = bounded.read_json(path, MOST_MANIFEST)
    except OSError as error:
        raise ToolchainError(f"{path}: {error.strerror}; {PREPARE}") from error
    except ValueError as error:
        raise ToolchainError(f"{path}: no JSON ({error}); {PREPARE}") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        has = brief(found.get("schema")) if isinstance(found, dict) else type(found).__name__
        raise ToolchainError(f"{path}: schema {has}, and this kvgen reads {SCHEMA}; {PREPARE}")
    if found != sealed(found):
        raise ToolchainError(f"{path}: not what was written (its sha256 differs); {PREPARE}")
    try:
        prepared = tuple(_prepared(row) for row in found["prepared"])
        return Manifest(found["kvgen"], found["target"], found["toolchain"], prepared)
    except (KeyError, TypeError, ValueError, AttributeError, VerifyError) as error:
        raise ToolchainError(f"{path}: damaged ({type(error).__name__}: {error}); {PREPARE}") from error


def _prepared(row: Mapping[str, Any]) -> Prepared:
    spec, record = Spec.from_dict(row["spec"]), PageRecord.from_dict(row["record"])
    verify_record(spec, record)
    return Prepared(
        spec,
        record,
        {op: (pair[0], pair[1]) for op, pair in row["digests"].items()},
        tuple(
            Candidate(from_json(c["plan"], spec), c["default"], c["predicted"], _binaries(c["binaries"]))
            for c in row["candidates"]
        ),
    )


def _binaries(rows: Sequence[Mapping[str, Any]]) -> tuple[Binary, ...]:
    return tuple(
        Binary(
            **{
                **row,
                "signature": tuple((name, kind) for name, kind in row["signature"]),
                "file": File(**row["file"]),
            }
        )
        for row in rows
    )
