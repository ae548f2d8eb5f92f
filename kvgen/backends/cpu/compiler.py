"""Find a C++ compiler that really builds an OpenMP shared object, and run it so that it cannot outlive its
timeout.

Order: ``$KVGEN_CXX`` (binding: if it is set and broken, that is an error), ``$CXX``, ``g++``, ``clang++``,
``c++``. The first two may carry arguments (``ccache g++``). A compiler counts when it builds and links a tiny
shared object with ``-fopenmp``; the outcome is remembered in the cache folder, keyed by the compiler's
identity.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import shlex
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvgen import paths
from kvgen.backends.cpu.isa import machine
from kvgen.backends.cpu.process import invoke
from kvgen.errors import ToolchainError

PROBE_SOURCE = """\
#include <cstdint>
#include <cmath>
#include <omp.h>
extern "C" int kvgen_probe(const void* args) {
  const int64_t threads = *static_cast<const int64_t*>(args);
  int64_t seen = 0;
#pragma omp parallel num_threads(static_cast<int>(threads)) reduction(+ : seen)
  seen += omp_get_thread_num() >= 0 ? 1 : 0;
  return static_cast<int>(seen);
}
"""
"""What a compiler must build to count: C++ headers, OpenMP headers and an OpenMP runtime to link with."""


@dataclass(frozen=True)
class Compiler:
    """A compiler found on this machine."""

    command: tuple[str, ...]
    """Program and leading arguments; the program is an absolute path."""
    kind: Literal["gcc", "clang"]
    """Family, which decides the names of the sanitizer runtimes."""
    version: str
    """First line of ``--version``."""
    triple: str
    """``-dumpmachine``: what it compiles for, e.g. ``x86_64-linux-gnu``."""

    @property
    def arch(self) -> str:
        """Architecture compiled for, spelled as ``isa.machine`` does."""
        first = self.triple.partition("-")[0]
        return {"arm64": "aarch64", "amd64": "x86_64"}.get(first, first)

    @property
    def identity(self) -> str:
        """What a build's key holds: no paths, so the same compiler elsewhere hits the same cache entry."""
        return f"{self.version} | {self.triple} | {' '.join(self.command[1:])}"


def find_compiler() -> Compiler:
    """The first working compiler, remembered per process for each value of the environment variables read.

    Raises:
        ToolchainError: none works; the message names each one tried, what went wrong, and how to install one.
    """
    return _find(os.environ.get("KVGEN_CXX", ""), os.environ.get("CXX", ""), os.environ.get("PATH", ""))


@functools.lru_cache(maxsize=8)
def _find(explicit: str, cxx: str, path: str) -> Compiler:
    """``find_compiler`` for given values of its environment variables (a failure is not remembered)."""
    if explicit.strip():
        candidates = [("KVGEN_CXX", explicit)]
    else:
        candidates = [("CXX", cxx)] if cxx.strip() else []
        candidates += [("PATH", name) for name in ("g++", "clang++", "c++")]
    tried: list[str] = []
    for origin, text in candidates:
        try:
            compiler = identify(text, path)
            probe(compiler)
        except ToolchainError as error:
            tried.append(f"  {text} (from {origin}): {error}")
        else:
            return compiler
    raise ToolchainError(
        "no working C++ compiler with OpenMP. Tried:\n" + "\n".join(tried) + "\n" + install_hint()
    )


def identify(text: str, path: str | None = None) -> Compiler:
    """Name a compiler given as a command line, without compiling.

    Raises:
        ToolchainError: the program does not exist, or does not answer like a compiler.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ToolchainError(f"not a command line ({error})") from error
    program = shutil.which(words[0], path=path) if words else None
    if program is None:
        raise ToolchainError("not found")
    command = (str(Path(program).absolute()), *words[1:])
    with tempfile.TemporaryDirectory(prefix="kvgen-cxx-") as folder:
        version = invoke((*command, "--version"), cwd=Path(folder), timeout_s=30)
        triple = invoke((*command, "-dumpmachine"), cwd=Path(folder), timeout_s=30)
    if version.returncode or triple.returncode or not version.output.strip() or not triple.output.strip():
        raise ToolchainError(f"does not answer --version and -dumpmachine: {version.output.strip()[:200]!r}")
    kind: Literal["gcc", "clang"] = "clang" if "clang" in version.output.lower() else "gcc"
    return Compiler(command, kind, version.output.strip().splitlines()[0], triple.output.strip())


def probe(compiler: Compiler) -> None:
    """Build ``PROBE_SOURCE`` as a shared object, unless this very compiler is known to have done so.

    Raises:
        ToolchainError: it cannot compile or link; the message holds its first error lines.
    """
    stat = os.stat(compiler.command[0])
    key = json.dumps([PROBE_SOURCE, compiler.command, compiler.identity, stat.st_size, stat.st_mtime_ns])
    # Only successes are kept: a failure may be cured by installing a package, which leaves the compiler as it
    # was.
    record = paths.subfolder("build") / f"probe-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    if record.exists():
        return
    with tempfile.TemporaryDirectory(prefix="kvgen-probe-") as name:
        folder = Path(name)
        (folder / "probe.cpp").write_text(PROBE_SOURCE)
        command = (
            *compiler.command,
            "-std=c++17",
            "-O1",
            "-fPIC",
            "-shared",
            "-fopenmp",
            "probe.cpp",
            "-o",
            "probe.so",
        )
        done = invoke(command, cwd=folder, timeout_s=60)
        if done.returncode or not (folder / "probe.so").is_file():
            raise ToolchainError(
                f"cannot build an OpenMP shared object: {' | '.join(first_errors(done.output, 3))}"
            )
    paths.write_atomic(
        record, json.dumps({"compiler": compiler.identity, "command": compiler.command}, indent=1) + "\n"
    )


def first_errors(output: str, count: int = 8) -> list[str]:
    """The first lines of a compiler's output that state an error; its first lines when none does."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    marks = ("error:", "error ", "undefined reference", "cannot find", "ld returned", "unable to")
    return [line for line in lines if any(mark in line.lower() for mark in marks)][:count] or lines[:count]


def sanitizer_libraries(compiler: Compiler) -> tuple[Path, ...]:
    """The runtimes to preload (``LD_PRELOAD``) before Python loads a sanitised build of this compiler.

    Raises:
        ToolchainError: they are not installed.
    """
    # Clang's shared address-sanitizer runtime contains the undefined-behaviour one; GCC ships two libraries.
    names = ("libasan.so", "libubsan.so") if compiler.kind == "gcc" else (f"libclang_rt.asan-{machine()}.so",)
    found: list[Path] = []
    with tempfile.TemporaryDirectory(prefix="kvgen-cxx-") as folder:
        for name in names:
            done = invoke((*compiler.command, f"-print-file-name={name}"), cwd=Path(folder), timeout_s=30)
            file = Path(done.output.strip())
            if done.returncode or not file.is_absolute() or not file.is_file():
                raise ToolchainError(f"{name} of {compiler.version} is not installed; {install_hint()}")
            found.append(file)
    return tuple(found)


def install_hint() -> str:
    """One line that says how to get a compiler with OpenMP on this system."""
    if platform.system() == "Darwin":
        return "Install one: brew install gcc; export KVGEN_CXX=g++-14 (Apple's clang has no OpenMP runtime)"
    choices = {
        "apt-get": "apt-get install g++",
        "dnf": "dnf install gcc-c++",
        "zypper": "zypper install gcc-c++",
        "pacman": "pacman -S gcc",
        "apk": "apk add g++",
        "conda": "conda install -c conda-forge gxx",
    }
    here = [line for tool, line in choices.items() if shutil.which(tool)]
    return "Install one: " + " or ".join(here or list(choices.values()))
