"""One OpenMP runtime per process: whose libgomp our kernels use, and why it is not linked into them.

Measured with torch 2.13 (CPU) on 2 cores, one 2-thread kernel after one 2-thread torch op of 0.12 ms:

* same libgomp for both: 0.12 ms a pair;
* two libgomp copies, or GCC's beside Clang's libomp: 0.4 to 4.2 ms a pair. After a parallel region the pool's
  idle threads spin for some milliseconds, each on a core that the other runtime's threads are waiting for.

torch's wheels bring a libgomp of their own, under the usual soname or under a hashed one. With the usual
soname the dynamic linker gives both of us whichever copy came first; with a hashed one, ``-lgomp`` would
bring in a second runtime. So on Linux GCC's kernels are linked *without* libgomp, and the loader first puts
one copy into the global scope: the one already in the process (torch's, if there are several), else the one
in torch's wheel, so that a later ``import torch`` shares it, else the system's.

Kernels built by Clang call LLVM's libomp, which has to be linked: beside torch they run at the lower speed
above unless they use one thread or ``OMP_WAIT_POLICY=passive`` is set before torch starts its threads (0.3 ms
a pair). The loader warns once. g++ comes first in the compiler search for this reason.

Sharing a runtime means sharing its settings, so kvgen touches none: the thread count is an argument of every
kernel (``num_threads(threads)``), which neither follows nor changes ``torch.set_num_threads``. A kernel asked
for one thread should open no parallel region (``if (threads > 1)``), so that it neither wakes nor waits for a
pool.

After ``fork`` the pool's threads are gone but the forking thread believes in them, and its next region waits
forever. A child must run kernels from a *new* thread, which gets a pool of its own, or with one thread.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
import sys
import warnings
from pathlib import Path

from kvgen.errors import ToolchainError

_RUNTIME = re.compile(r"lib(?:gomp|omp|iomp5)\b.*\.so")
_provided: ctypes.CDLL | None = None
_warned = False


def links_runtime(kind: str, triple: str) -> bool:
    """Whether a compiler's kernels depend on their OpenMP runtime (Clang's do; off Linux, all)."""
    return kind != "gcc" or "linux" not in triple


def provide() -> Path | None:
    """Put one libgomp into the global symbol scope, where kernels linked without it find it. Once per
    process.

    Returns:
        The copy in use; None off Linux, where kernels bring their own.

    Raises:
        ToolchainError: there is no libgomp on this machine.
    """
    global _provided
    if platform.system() != "Linux":
        return None
    if _provided is None:
        errors: list[str] = []
        for candidate in _candidates():
            try:
                # Global scope also promotes a copy that is loaded already; it never loads the same file
                # twice.
                _provided = ctypes.CDLL(candidate, mode=os.RTLD_NOW | os.RTLD_GLOBAL)
            except OSError as error:
                errors.append(str(error))
            else:
                break
        else:
            raise ToolchainError(
                f"no OpenMP runtime (libgomp.so.1): {'; '.join(errors)}. "
                "It comes with g++; alone: apt-get install libgomp1"
            )
    return next(iter(p for p in in_process() if p.name.startswith("libgomp")), None)


def _candidates() -> list[str]:
    """The libgomp copies to use, best first: loaded ones (torch's before others), torch's wheel's, the
    system's.
    """
    loaded = [path for path in in_process() if path.name.startswith("libgomp")]
    folder = torch_folder()
    wheel = sorted(folder.glob("libgomp*.so*")) if folder else []
    loaded.sort(key=lambda path: path not in wheel)
    # A copy of torch's that this process does not use yet comes after the loaded ones: one runtime, not two.
    return [*map(str, loaded), *map(str, wheel), "libgomp.so.1"]


def torch_folder() -> Path | None:
    """Where the installed torch keeps its libraries, found without importing it; None without torch."""
    module = sys.modules.get("torch")
    spec = getattr(module, "__spec__", None) if module else importlib.util.find_spec("torch")
    locations = getattr(spec, "submodule_search_locations", None)
    return (Path(next(iter(locations))) / "lib").resolve() if locations else None


def in_process() -> list[Path]:
    """The OpenMP runtimes mapped into this process, in address order; empty where ``/proc`` does not say."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    found: dict[Path, None] = {}
    for line in lines:
        words = line.split(maxsplit=5)
        if len(words) == 6 and _RUNTIME.fullmatch(re.sub(r"(\.so)[.\d]*$", r"\1", Path(words[5]).name)):
            found[Path(words[5])] = None
    return list(found)


def warn_if_several(linked: bool) -> None:
    """Warn once when kernels and torch use different OpenMP runtimes: right results, at a fraction of the
    speed.

    Args:
        linked: whether the library just loaded brought its own runtime, as Clang's do.
    """
    global _warned
    runtimes = in_process()
    copies = [path for path in runtimes if path.name.startswith("libgomp")]
    if _warned or len(copies) < (1 if linked else 2):
        return
    _warned = True
    warnings.warn(
        f"several OpenMP runtimes in one process ({', '.join(map(str, runtimes))}): kernels and torch ops "
        "that alternate may run many times slower. Build with g++ (KVGEN_CXX=g++), set "
        "OMP_WAIT_POLICY=passive before Python starts, or use one thread (KVGEN_NUM_THREADS=1).",
        RuntimeWarning,
        stacklevel=3,
    )
