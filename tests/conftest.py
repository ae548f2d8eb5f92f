"""What every test gets: a throw-away kernel cache, a scrubbed environment, machine markers, hypothesis profiles.

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
SCRUBBED = ("KVGEN_AUTOTUNE_EFFORT", "KVGEN_CACHE_DIR", "KVGEN_LOG", "KVGEN_PRINT_CODE")

# CPU rows and the flags they stand on. A test may also name a flag itself, e.g. isa("avx512_vnni").
ROWS: dict[str, tuple[str, ...]] = {
    "portable": (),
    "avx2": ("avx2", "fma", "f16c"),
    "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "f16c"),
}
FLAGS = frozenset(
    "avx avx2 fma f16c avx_vnni avx512f avx512bw avx512dq avx512vl avx512cd avx512_vnni avx512_bf16 avx512_fp16 "
    "avx512vbmi avx512_vbmi2 amx_tile amx_int8 amx_bf16 asimd asimddp bf16 i8mm sve sve2".split()
)

settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", parent=settings.get_profile("dev"), max_examples=2000)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files instead of comparing")


def pytest_configure(config: pytest.Config) -> None:
    in_ci = bool(os.environ.get("CI"))
    if in_ci and config.getoption("--update-golden"):
        raise pytest.UsageError("--update-golden would make every golden test pass: not in CI")
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if in_ci else "dev"))
    if hasattr(config, "workerinput"):
        return  # an xdist worker inherits the controller's environment, cache folder included
    for name in SCRUBBED:
        os.environ.pop(name, None)
    kept = os.environ.get("KVGEN_TEST_CACHE_DIR")
    folder = Path(kept).resolve() if kept else Path(tempfile.mkdtemp(prefix="kvgen-tests-"))
    folder.mkdir(parents=True, exist_ok=True)
    # Set before any test module is imported: one folder for all workers, so that each kernel compiles once.
    os.environ["KVGEN_CACHE_DIR"] = str(folder)
    if not kept:
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@cache
def cpu_flags() -> frozenset[str]:
    """The CPU's flags as the kernel sees them; on purpose not kvgen's own probe, whose fault would skip its tests."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return frozenset()
    for line in info.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def missing_flags(row: str) -> list[str]:
    """The flags that ``row`` (``avx512`` or ``cpu-avx512``, or a flag) needs and this CPU lacks."""
    name = row.removeprefix("cpu-")
    if name not in ROWS and name not in FLAGS:
        known = ", ".join(ROWS) + "; or a CPU flag: " + ", ".join(sorted(FLAGS))
        raise pytest.UsageError(f"isa({row!r}): no such CPU row, the test would never run; known: {known}")
    return [flag for flag in ROWS.get(name, (name,)) if flag not in cpu_flags()]


@cache
def why_no_gpu() -> str:
    """Empty where torch can use a GPU, else the reason. The device file is looked at first: torch takes seconds."""
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
