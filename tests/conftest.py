"""What every test gets: a throw-away kernel cache, a scrubbed environment, machine markers, profiles.

Environment of the tests (all optional):
  KVGEN_TEST_CACHE_DIR   folder for compiled kernels, kept between runs (default: a temporary one)
  HYPOTHESIS_PROFILE     ci | dev | thorough (default: ci where CI is set, else dev)
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# What a developer's shell may hold, and what would change the outcome of a test.
SCRUBBED = ("KVGEN_AUTOTUNE_EFFORT", "KVGEN_CACHE_DIR", "KVGEN_LOG", "KVGEN_PRINT_CODE", "KVGEN_TRUST")

# CPU rows and optional features, and the flags they stand on, in the words of /proc/cpuinfo. On purpose not
# kvgen's own probe, whose fault would skip the tests that find it; packaging/test_conftest.py compares them.
AVX2 = ("avx2", "fma", "f16c", "bmi2")
ROWS: dict[str, tuple[str, ...]] = {
    "portable": (),
    "avx2": AVX2,
    "avx512": (*AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl"),
    "bf16": ("avx512_bf16",),
    "vnni": ("avx512_vnni",),
    "vbmi": ("avx512vbmi",),
    "amx": ("amx_tile", "amx_int8", "amx_bf16"),
}
FLAGS = frozenset(flag for flags in ROWS.values() for flag in flags)

settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", parent=settings.get_profile("dev"), max_examples=2000)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files instead of comparing")
    parser.addoption("--update-ledger", action="store_true", help="compile what the GPU ledger lacks")


def pytest_configure(config: pytest.Config) -> None:
    in_ci = bool(os.environ.get("CI"))
    if in_ci and config.getoption("--update-golden"):
        raise pytest.UsageError("--update-golden would make every golden test pass: not in CI")
    if config.getoption("--update-ledger") and (in_ci or getattr(config.option, "numprocesses", None)):
        raise pytest.UsageError("--update-ledger compiles on all cores and writes a file: not in CI, no -n")
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if in_ci else "dev"))
    if hasattr(config, "workerinput"):
        return  # an xdist worker inherits the controller's environment, cache folder included
    for name in SCRUBBED:
        os.environ.pop(name, None)
    # Two workers whose kernels wait for each other's threads take ten times as long. Tests of threads ask for
    # them.
    os.environ["KVGEN_NUM_THREADS"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    kept = os.environ.get("KVGEN_TEST_CACHE_DIR")
    folder = Path(kept).resolve() if kept else Path(tempfile.mkdtemp(prefix="kvgen-tests-"))
    folder.mkdir(parents=True, exist_ok=True)
    # Set before any test module is imported: one folder for all workers, so that each kernel compiles once.
    os.environ["KVGEN_CACHE_DIR"] = str(folder)
    if not kept:
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@cache
def cpu_flags() -> frozenset[str]:
    """The CPU's flags as the operating system sees them."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return frozenset()
    lists = [
        frozenset(line.partition(":")[2].split())
        for line in info.read_text().splitlines()
        if line.startswith("flags")
    ]
    return frozenset.intersection(*lists) if lists else frozenset()  # hybrid CPUs: only what every core has


def missing_flags(row: str) -> list[str]:
    """The flags that ``row`` (``avx512`` or ``cpu-avx512``, or a flag) needs and this CPU lacks."""
    name = row.removeprefix("cpu-")
    if name not in ROWS and name not in FLAGS:
        known = ", ".join(ROWS) + "; or a CPU flag: " + ", ".join(sorted(FLAGS))
        raise pytest.UsageError(f"isa({row!r}): no such CPU row, the test would never run; known: {known}")
    return [flag for flag in ROWS.get(name, (name,)) if flag not in cpu_flags()]


@cache
def why_no_gpu() -> str:
    """Empty where torch can use a GPU, else the reason. Device files first: torch takes seconds to load."""
    if not any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
        return "no GPU on this machine"
    try:
        import torch
    except ImportError as error:
        return f"no torch to reach the GPU with ({error})"
    if torch.cuda.is_available():
        return ""
    return f"there is a GPU, but torch {torch.__version__} cannot use it"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("isa"):
            for row in mark.args:
                if missing := missing_flags(row):
                    reason = f"needs the CPU row {row}; this {platform.machine()} lacks {' '.join(missing)}"
                    item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("gpu") and (reason := why_no_gpu()):
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))


@pytest.fixture(scope="session")
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be rewritten (``pytest --update-golden``)."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The folder that holds pyproject.toml."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def own_cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty ``KVGEN_CACHE_DIR`` for this test alone, for tests of the cache itself."""
    folder = tmp_path / "kvgen-cache"
    folder.mkdir()
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def nothing_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package came without tuned winners: a test sees its own folder only."""
    from kvgen.tune import store

    monkeypatch.setattr(store, "folders", lambda cache_dir: iter([(cache_dir, True)] if cache_dir else []))
