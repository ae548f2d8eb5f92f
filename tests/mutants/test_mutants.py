"""Each planted fault is caught by the ordinary test that it names: ``pytest -m mutants``, six minutes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import plant
from tests.mutants.fault import FAULTS, TOUCHED, Fault

assert plant.MODULES  # they fill FAULTS


@pytest.mark.mutants
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_is_caught(fault: Fault, repo_root: Path, tmp_path: Path) -> None:
    """Under the fault the named test fails; a process that dies of a signal has noticed too."""
    touched = tmp_path / "touched"
    environment = {**os.environ, "KVGEN_MUTANT": fault.name, TOUCHED: str(touched)}
    command = [sys.executable, "-m", "pytest", "-xq", "-p", "tests.mutants.plant", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-m", "not slow and not mutants and not hours", fault.caught_by],
        cwd=repo_root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    told = f"{fault.name}: {fault.says}\n{done.stdout[-4000:]}{done.stderr[-2000:]}"
    assert done.returncode in (0, 1) or done.returncode < 0, f"the test did not run under {told}"
    assert touched.exists(), f"{fault.caught_by} does not meet the fault {told}"
    assert done.returncode, f"nothing failed under {told}"


def test_there_are_enough_and_each_says_what_it_does() -> None:
    assert len(FAULTS) >= 60
    for fault in FAULTS.values():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", fault.name)
        assert fault.says[0].isupper() and fault.says.endswith(".") and len(fault.says) > 20


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_names_a_test_that_exists(fault: Fault, repo_root: Path) -> None:
    path, _, test = fault.caught_by.partition("::")
    text = (repo_root / path).read_text()
    assert re.search(rf"^\s*def {re.escape(test.partition('[')[0].rpartition('::')[2])}\(", text, re.M)
