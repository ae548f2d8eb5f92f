"""Manifest: what an exported folder holds, as its ``manifest.json`` says. Written by ``kvgen.export``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvgen import bounded, trust
from kvgen.errors import ToolchainError, brief
from kvgen.ir import CODECS, Codec, PageRecord, Schedule, Spec
from kvgen.ir.codec import register
from kvgen.ir.plan import Arg
from kvgen.ir.verify import VerifyError, verify_record

SCHEMA = 2
"""Version of the manifest's fields."""

NAME = "manifest.json"

MOST_MANIFEST, MOST_FILE = 64 << 20, 1 << 30
"""Most bytes of a manifest, and of a file that it names."""


@dataclass(frozen=True)
class File:
    """A file of the folder and what must be in it."""

    path: str
    """Relative to the manifest, with forward slashes."""
    size: int
    sha256: str

    @classmethod
    def of(cls, path: str, data: bytes) -> File:
        """The record of a file with this content."""
        return cls(path, len(data), hashlib.sha256(data).hexdigest())

    def verify(self, folder: Path) -> Path:
        """The file's full path, after reading it.

        Raises ``ToolchainError`` where it is not what was exported, lies elsewhere or others may write to it.
        """
        return self._read(folder)[0]

    def content(self, folder: Path) -> bytes:
        """What is in the file; ``ToolchainError`` as for ``verify``."""
        return self._read(folder)[1]

    def _read(self, folder: Path) -> tuple[Path, bytes]:
        try:
            path = trust.inside(folder, self.path)
        except ValueError as error:
            raise ToolchainError(f"{folder / NAME}: {error}; export the library again") from None
        trust.require(path)
        try:
            data = bounded.read(path, MOST_FILE, exactly=self.size)
            why = "" if File.of(self.path, data) == self else "content changed"
        except OSError as error:
            raise ToolchainError(f"{path}: {error.strerror}; export the library again") from error
        except bounded.RefusedError as error:
            why = str(error)
        if why:
            raise ToolchainError(
                f"{path}: not the file that {NAME} vouches for ({why}); it is not used. Export again"
            )
        return path, data


@dataclass(frozen=True)
class Exported:
    """One kernel of one target."""

    op: str
    variant: str
    entry: str
    """Symbol of a CPU kernel, or the kernels of a Triton module in launch order, joined by ``+``."""
    args: tuple[Arg, ...]
    """Arguments in ABI order."""
    schedule: Schedule
    source: File
    """The readable kernel."""
    binaries: tuple[File, ...]
    """CPU: one shared object. GPU: a cubin or hsaco for each kernel of the module."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """CPU: the sidecar of the build. GPU: by kernel, signature, warps, registers, spills, shared memory."""
    features: tuple[str, ...] | None = None
    """Optional instructions that its target was planned with; None in what kvgen 0.1.0 and earlier wrote."""


@dataclass(frozen=True)
class Manifest:
    """All that an exported folder holds."""

    kvgen: str
    """Version that wrote it."""
    spec: Spec
    record: PageRecord
    targets: Mapping[str, tuple[Exported, ...]]
    """Kernels by target, e.g. ``cpu-avx512``."""
    frequencies: tuple[tuple[float, ...], float] | None = None
    """Rope: angles of one step of position, and the factor on cosines and sines; None without rope."""

    def dump(self) -> str:
        """The manifest's text."""
        codecs = carried(self.spec)
        body = {
            "schema": SCHEMA,
            "kvgen": self.kvgen,
            **({"codecs": [codec.to_dict() for codec in codecs]} if codecs else {}),
            "spec": self.spec.to_dict(),
            **({"meanings": dict(self.spec.meanings)} if self.spec.meanings else {}),
            "spec_sha256": self.spec.hash,
            "page_record": self.record.to_dict(),
            **({"frequencies": self.frequencies} if self.frequencies else {}),
            "targets": {
                name: [asdict(kernel) | {"schedule": kernel.schedule.to_dict()} for kernel in kernels]
                for name, kernels in self.targets.items()
            },
        }
        return json.dumps(sealed(body), indent=1) + "\n"


def sealed(body: Mapping[str, Any]) -> dict[str, Any]:
    """``body`` with the sha256 of its other values. Arguments and strides steer kernels as code does."""
    values = {key: value for key, value in body.items() if key != "sha256"}
    return values | {"sha256": hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()}


def carried(spec: Spec) -> tuple[Codec, ...]:
    """The codecs of ``spec`` whose definitions travel with it: all but kvgen's own that every version has
    kernels for. Another process, or another version, may not know them, or know others of the same name."""
    used = {p.quant.format for side in spec.cache.fields for p in spec.segments(side)}
    found = (CODECS[name] for name in sorted(used))
    return tuple(codec for codec in found if not (codec.built_in and codec.fast))


def _learn(path: Path, codecs: Any) -> None:
    """Make the codecs of a manifest known; ``ToolchainError`` where a name means something else here."""
    for values in codecs:
        codec = Codec.from_dict(values)
        known = CODECS.get(codec.name)
        if known is None:
            register(codec)
        elif known != codec:
            reason = f"its codec {codec.name!r} is not the one that is registered here under that name"
            raise ToolchainError(f"{path}: {reason}; export again, or load it in a process of its own")


def read_body(folder: Path) -> dict[str, Any]:
    """The values of the manifest in ``folder``, as written; ``ToolchainError`` where they are not."""
    path = folder / NAME
    try:
        found = bounded.read_json(path, MOST_MANIFEST)
    except OSError as error:
        raise ToolchainError(
            f"{path}: {error.strerror}; give the folder of a package that `kvgen export` wrote"
        ) from error
    except ValueError as error:
        raise ToolchainError(f"{path}: no JSON ({error}); export the library again") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        has = brief(found.get("schema")) if isinstance(found, dict) else type(found).__name__
        raise ToolchainError(f"{path}: schema {has}, and this loader reads {SCHEMA}; export again")
    if found != sealed(found):
        raise ToolchainError(f"{path}: not what was written (its sha256 differs); export again")
    return found


def read_manifest(folder: Path) -> Manifest:
    """The manifest in ``folder``; ``ToolchainError`` says what is wrong with it.

    Codecs that it brings along are registered for the rest of the process.
    """
    path = folder / NAME
    trust.require(path)
    found = read_body(folder)
    try:
        _learn(path, found.get("codecs", ()))
        manifest = Manifest(
            found["kvgen"],
            Spec.from_dict(found["spec"], found.get("meanings", {})),
            PageRecord.from_dict(found["page_record"]),
            {name: tuple(map(_exported, kernels)) for name, kernels in found["targets"].items()},
            _frequencies(found.get("frequencies")),
        )
        expected = found["spec_sha256"]
        if manifest.spec.hash != expected:
            raise ToolchainError(f"{path}: its spec is not the one it was written for (sha256 differs)")
        verify_record(manifest.spec, manifest.record)
    except VerifyError as error:
        raise ToolchainError(f"{path}: its page record is not its spec's ({error}); export again") from None
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, StopIteration) as error:
        raise ToolchainError(
            f"{path}: damaged ({type(error).__name__}: {brief(str(error))}); export again"
        ) from error
    return manifest


def _frequencies(values: Any) -> tuple[tuple[float, ...], float] | None:
    return None if values is None else (tuple(map(float, values[0])), float(values[1]))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{brief(value)} is no text")
    return value


def _exported(values: Mapping[str, Any]) -> Exported:
    return Exported(
        _text(values["op"]),
        _text(values["variant"]),
        _text(values["entry"]),
        tuple(Arg(**arg) for arg in values["args"]),
        Schedule.of(values["schedule"]),
        File(**values["source"]),
        tuple(File(**binary) for binary in values["binaries"]),
        values["facts"],
        None if (features := values.get("features")) is None else tuple(map(str, features)),
    )
