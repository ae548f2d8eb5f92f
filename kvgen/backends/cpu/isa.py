"""Instruction sets of the CPU target: which rows exist, their compiler flags, what this CPU can run.

A *row* is what a kernel is written for; a *feature* is an instruction-set extension with one compiler flag.
Flags are always explicit, never ``-march=native``: the flags are part of a build's identity, so a cache
carried to another CPU is a miss (or a refusal at load), not an illegal instruction. Conversely the features a
binary needs are read back from its flags (``required_by``), so that the two can't disagree.

Compiling for a row that this CPU lacks is allowed (cross compile). Running it is refused by
``check_runnable``.
"""

from __future__ import annotations

import functools
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from kvgen.errors import ArgumentError, UnsupportedError, brief

FEATURES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        # name: (word in /proc/cpuinfo, compiler flag)
        "avx2": ("avx2", "-mavx2"),
        "fma": ("fma", "-mfma"),
        "f16c": ("f16c", "-mf16c"),
        "bmi2": ("bmi2", "-mbmi2"),
        "avx512f": ("avx512f", "-mavx512f"),
        "avx512bw": ("avx512bw", "-mavx512bw"),
        "avx512dq": ("avx512dq", "-mavx512dq"),
        "avx512vl": ("avx512vl", "-mavx512vl"),
        "bf16": ("avx512_bf16", "-mavx512bf16"),
        "vnni": ("avx512_vnni", "-mavx512vnni"),
        "vbmi": ("avx512vbmi", "-mavx512vbmi"),
    }
)
"""Every feature a row can use. A flag that is not here is not passed, so nothing unchecked can be emitted."""

_FLAG_TO_FEATURE = {flag: name for name, (_, flag) in FEATURES.items()}
_TUNING_FLAGS = (
    "-mprefer-vector-width=",
    "-mtune=",
)  # change the choice of instructions, not the instruction set
_BASELINE_FLAGS = ("-m64", "-msse", "-msse2", "-mfxsr", "-mcmodel=")  # already part of every x86-64


@dataclass(frozen=True)
class IsaRow:
    """One row: the extensions its kernels rely on and those they use where present."""

    name: str
    """``avx512``, ``avx2`` or ``portable``."""
    required: tuple[str, ...]
    """Features without which the row cannot run; all of them get their flag."""
    optional: tuple[str, ...]
    """Features that a kernel of this row may ask for besides."""
    tuning: tuple[str, ...]
    """Flags that steer the compiler without adding instructions."""
    vector_bytes: int
    """Bytes in a vector register."""

    @property
    def target(self) -> str:
        """The target's name, ``cpu-<row>``, which keys caches."""
        return f"cpu-{self.name}"


_AVX2 = ("avx2", "fma", "f16c", "bmi2")
ROWS: Mapping[str, IsaRow] = MappingProxyType(
    {
        # GCC and Clang default to 256-bit vectors on some tunings even with AVX-512 enabled.
        "avx512": IsaRow(
            "avx512",
            (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl"),
            ("bf16", "vnni", "vbmi"),
            ("-mprefer-vector-width=512",),
            64,
        ),
        "avx2": IsaRow("avx2", _AVX2, (), (), 32),
        "portable": IsaRow("portable", (), (), (), 16),
    }
)
"""All rows, best first. ``portable`` is the ABI's baseline: SSE2 on x86-64, Advanced SIMD on aarch64."""


def machine() -> str:
    """This machine's architecture under one spelling: ``x86_64``, ``aarch64``, or what the platform says."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}.get(name, name)


@functools.lru_cache(maxsize=1)
def cpu_features() -> frozenset[str]:
    """The names in ``FEATURES`` that this CPU *and* its operating system support; empty off x86-64.

    Linux: ``/proc/cpuinfo``, whose flags leave out what the kernel does not save on a context switch. macOS:
    sysctl.
    """
    if machine() != "x86_64":
        return frozenset()
    if platform.system() == "Darwin":
        return _darwin_features()
    try:
        return parse_cpuinfo(Path("/proc/cpuinfo").read_text(errors="replace"))
    except OSError:
        return frozenset()  # no /proc (a locked-down container): the portable row is always right


def parse_cpuinfo(text: str) -> frozenset[str]:
    """The features that *every* processor in the text of ``/proc/cpuinfo`` has (hybrid CPUs differ)."""
    lists = [set(line.partition(":")[2].split()) for line in text.splitlines() if line.startswith("flags")]
    common: set[str] = set.intersection(*lists) if lists else set()
    return frozenset(name for name, (word, _) in FEATURES.items() if word in common)


def _darwin_features() -> frozenset[str]:
    """Features of an Intel Mac, from the two sysctl lists."""
    command = ["sysctl", "-n", "machdep.cpu.features", "machdep.cpu.leaf7_features"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    words = set(done.stdout.lower().split())
    # sysctl writes AVX512VNNI where Linux writes avx512_vnni
    return frozenset(
        n for n, (word, _) in FEATURES.items() if word in words or word.replace("_", "") in words
    )


def best_row(features: Iterable[str] | None = None) -> IsaRow:
    """The first row of ``ROWS`` whose required features are all in ``features`` (default: this CPU's)."""
    have = cpu_features() if features is None else frozenset(features)
    return next(row for row in ROWS.values() if have.issuperset(row.required))


def resolve_target(target: str) -> IsaRow:
    """The row of a target name: ``cpu`` (this CPU's best), ``cpu-avx512``, ``cpu-avx2``, ``cpu-portable``.

    Raises:
        UnsupportedError: not a CPU target's name.
    """
    if target == "cpu":
        return best_row()
    row = ROWS.get(target.removeprefix("cpu-")) if target.startswith("cpu-") else None
    if row is None:
        names = ", ".join(row.target for row in ROWS.values())
        raise UnsupportedError(
            f"target = {brief(target)}: not a CPU target; use cpu (the best row of this CPU), {names}"
        )
    return row


def default_features(row: IsaRow) -> tuple[str, ...]:
    """The optional features of ``row`` that this CPU has; none when it cannot run the row."""
    have = cpu_features()
    return tuple(f for f in row.optional if f in have) if have.issuperset(row.required) else ()


def flags_for(isa: str | IsaRow, features: Iterable[str] = (), *, arch: str | None = None) -> tuple[str, ...]:
    """The compiler flags of a row with the given optional features, in a fixed order.

    Args:
        isa: a row or its name, e.g. ``"avx512"``.
        features: optional features of that row, e.g. ``("bf16", "vnni")``.
        arch: architecture compiled for; default: this machine's.

    Raises:
        UnsupportedError: no such row, the row lacks a feature, or the row does not exist on ``arch``.
    """
    if isinstance(isa, str):
        if isa not in ROWS:
            raise UnsupportedError(f"isa = {isa!r}: no such row; use {', '.join(ROWS)}")
        isa = ROWS[isa]
    wanted = set(features)
    if unknown := sorted(wanted.difference(isa.optional)):
        choice = ", ".join(isa.optional) or "none"
        raise UnsupportedError(
            f"features = {unknown!r}: not in row {isa.name}, whose optional features are: {choice}"
        )
    arch = machine() if arch is None else arch
    if isa.required and arch != "x86_64":
        raise UnsupportedError(
            f"isa = {isa.name!r}: an x86-64 row, and this build is for {arch}; use portable"
        )
    names = (*isa.required, *(f for f in isa.optional if f in wanted))
    return (*(FEATURES[name][1] for name in names), *isa.tuning)


def required_by(flags: Iterable[str]) -> tuple[str, ...]:
    """The features that code compiled with ``flags`` may use, in the order of ``FEATURES``.

    Raises:
        ArgumentError: a flag that selects instructions in a way that cannot be checked (``-march=...``,
        ``-mcpu=...``,
            an extension that is not in ``FEATURES``).
    """
    found: set[str] = set()
    for flag in flags:
        if flag in _FLAG_TO_FEATURE:
            found.add(_FLAG_TO_FEATURE[flag])
        elif flag.endswith("=native") or (
            flag.startswith("-m") and not flag.startswith((*_TUNING_FLAGS, *_BASELINE_FLAGS, "-mno-"))
        ):
            raise ArgumentError(
                f"flags: {flag!r} selects instructions that cannot be checked before a binary is loaded; "
                "use flags_for(row, features)"
            )
    return tuple(name for name in FEATURES if name in found)


def check_runnable(required: Iterable[str], *, what: str, arch: str | None = None) -> None:
    """Refuse code that this CPU would answer with an illegal instruction.

    Args:
        required: names in ``FEATURES`` that the code needs.
        what: names the code in the message.
        arch: architecture it was built for; default: this machine's.

    Raises:
        UnsupportedError: this CPU lacks one of them, or has another architecture.
    """
    here = machine()
    if arch is not None and arch != here:
        raise UnsupportedError(f"{what}: built for {arch}, and this machine is {here}; compile it here")
    if missing := [name for name in required if name not in cpu_features()]:
        raise UnsupportedError(
            f"{what}: needs {', '.join(missing)}, which this CPU lacks; its best is {best_row().target}"
        )
