"""One build request: sources, flags and options, what is allowed in them, and the key they make.

Numbers: ``-fno-math-errno`` and ``-fno-trapping-math`` only drop side effects (errno, status flags) that no
kernel reads. Everything that changes values is refused: ``-ffast-math`` and its parts break NaN and inf, and
at link time they add a start-up object that sets flush-to-zero for the whole process. ``-ffp-contract`` is
set explicitly because the compilers' defaults differ (GCC fast, Clang 14 on).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal

from kvgen.backends.cpu import artifact
from kvgen.backends.cpu.compiler import Compiler
from kvgen.backends.cpu.isa import required_by
from kvgen.backends.cpu.openmp import links_runtime
from kvgen.errors import ArgumentError

_LANGUAGE = ("-std=c++17", "-fPIC", "-fopenmp", "-Wall")
_NUMBERS = ("-fno-math-errno", "-fno-trapping-math")
# Names inside a library bind to itself: two kernels in one process may define helpers of the same name.
_SYMBOLS = ("-fvisibility-inlines-hidden", "-fno-semantic-interposition")
BASE_FLAGS = (*_LANGUAGE, *_NUMBERS, *_SYMBOLS)
LINUX_FLAGS = ("-Wl,-Bsymbolic", "-Wl,-z,now")
SANITIZE_FLAGS = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
    "-g",
)
REFUSED_FLAGS = {
    "-ffast-math": "NaN and inf must keep their meaning",
    "-Ofast": "it implies -ffast-math",
    "-funsafe-math-optimizations": "it links a start-up object that sets flush-to-zero for the whole process",
    "-ffinite-math-only": "NaN and inf must keep their meaning",
    "-fassociative-math": "the order of a sum is part of the numerics",
    "-freciprocal-math": "scales are defined by IEEE division",
    "-fno-signed-zeros": "the sign of zero must be kept",
}
"""Flags refused, each with the reason."""

OPT_LEVELS = ("-O0", "-O1", "-Og", "-O2", "-O3", "-Os")


@dataclass(frozen=True)
class Job:
    """Everything one build depends on, besides the compiler."""

    sources: tuple[str, ...]
    """C++ texts, compiled and linked together."""
    flags: tuple[str, ...] = ()
    """Extra flags, usually ``isa.flags_for(...)`` and ``-D`` definitions."""
    opt: str = "-O3"
    fp_contract: Literal["off", "fast"] = "fast"
    """``off`` keeps a product and a sum two roundings, as numpy has them."""
    sanitize: bool = False
    """Build with the address and undefined-behaviour sanitizers."""
    name: str = "kernel"
    """Base name of the files; shows in profilers and backtraces."""
    timeout_s: float = 120.0
    """Seconds the compiler may take; no part of the key."""

    def __post_init__(self) -> None:
        if not self.sources or not all(source.strip() for source in self.sources):
            raise ArgumentError("sources: at least one C++ text, none of them empty")
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,79}", self.name):
            raise ArgumentError(f"name = {self.name!r}: letters, digits and _.+- only, at most 80")
        if self.opt not in OPT_LEVELS:
            raise ArgumentError(f"opt = {self.opt!r}: use one of {', '.join(OPT_LEVELS)}")
        if self.fp_contract not in ("off", "fast"):
            raise ArgumentError(f"fp_contract = {self.fp_contract!r}: use off or fast")
        if self.timeout_s <= 0:
            raise ArgumentError(f"timeout_s = {self.timeout_s!r}: must be positive")
        for flag in self.flags:
            if flag in REFUSED_FLAGS:
                raise ArgumentError(f"flags: {flag} is refused: {REFUSED_FLAGS[flag]}")
        required_by(self.flags)

    def compile_flags(self, compiler: Compiler) -> tuple[str, ...]:
        """The flags of the compile step, in order, without file names."""
        sanitize = self._sanitize_flags(compiler)
        # GCC marks statics of inline functions "unique", and the dynamic linker then merges them across
        # libraries.
        unique = ("-fno-gnu-unique",) if compiler.kind == "gcc" else ()
        return (*BASE_FLAGS, *unique, self.opt, f"-ffp-contract={self.fp_contract}", *sanitize, *self.flags)

    def link_flags(self, compiler: Compiler) -> tuple[str, ...]:
        """The flags of the link step, in order, without file names."""
        linux = LINUX_FLAGS if "linux" in compiler.triple else ()
        runtime = ("-fopenmp",) if links_runtime(compiler.kind, compiler.triple) else ("-pthread",)
        return ("-shared", *runtime, *linux, *self._sanitize_flags(compiler))

    def _sanitize_flags(self, compiler: Compiler) -> tuple[str, ...]:
        """The sanitizers' flags, the same in both steps."""
        if not self.sanitize:
            return ()
        # Clang's default is a static runtime, which a shared object cannot hold.
        return (*SANITIZE_FLAGS, "-shared-libasan") if compiler.kind == "clang" else SANITIZE_FLAGS

    def key(self, compiler: Compiler) -> str:
        """sha256 (hex) of what decides the binary's content."""
        parts = [
            artifact.SCHEMA,
            list(self.sources),
            list(self.compile_flags(compiler)),
            list(self.link_flags(compiler)),
            compiler.identity,
            self.name,
        ]
        return artifact.digest(json.dumps(parts).encode())
