"""The records that the source tree ships: valid, of specs that exist, and found by a build."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvgen import paths
from kvgen.backends.cpu.backend import CpuBackend
from kvgen.backends.triton.backend import TritonBackend
from kvgen.builder import assemble
from kvgen.cli import app
from kvgen.errors import ArgumentError
from kvgen.ir import Spec
from kvgen.passes import render
from kvgen.passes.validate import load_spec
from kvgen.resolve import resolve_target
from kvgen.targets import known_target
from kvgen.tune import committed, search, store, tuner
from kvgen.tune.choose import UntunedWarning
from kvgen.tune.defaults import default_schedule
from kvgen.tune.key import key_of
from kvgen.tune.source_digest import source_digest
from kvgen.tune.space import load_space, space_of, spec_facts
from kvgen.tune.why import why
from tests.support.faults import small

SPEC = small()
GPU = known_target("sm_90")


@pytest.fixture(scope="module")
def examples(repo_root: Path) -> list[Spec]:
    return [load_spec(path) for path in sorted((repo_root / "examples").glob("*.toml"))]


def test_what_is_shipped_is_right(repo_root: Path, examples: list[Spec]) -> None:
    """Records that are stale are still starting points: `kvgen tune SPEC --why` names them."""
    assert not list(committed.problems(repo_root / "autotune_cache", examples))
    other = [p.name for p in (repo_root / "autotune_cache").rglob("*") if p.is_file() and p.suffix != ".json"]
    assert {name for name in other if not name.endswith(".pyc")} == {"__init__.py"}


def test_make_names_examples(repo_root: Path, examples: list[Spec]) -> None:
    text = (repo_root / "Makefile").read_text()
    lists = re.findall(r"^TUNED_(?:CPU|GPU) \?= (.+)$", text, re.MULTILINE)
    assert len(lists) == 2
    names = {name for words in lists for name in words.split()}
    assert {f"llama3-8b-{name}" for name in names} <= {spec.name for spec in examples}
    (targets,) = re.findall(r"^TUNED_GPUS \?= (.+)$", text, re.MULTILINE)
    assert all(known_target(name).backend == "triton" for name in targets.split())


def record(folder: Path, how: str = "predicted", device: str = "", **changes: Any) -> Path:
    """A record of decode on sm_90 with some fields changed."""
    schedule = default_schedule(TritonBackend(), "decode", SPEC, GPU, {})
    other = schedule.replace(num_warps=8 if schedule["num_warps"] != 8 else 4)
    winners = store.Winners(
        other, {"1x512": store.Best(other, 1.23456789e-5, None)}, how, "quick", device, "2026-01-02"
    )
    path = store.write(winners, key_of("decode", SPEC, GPU, {}, space_of("decode", GPU)), cache_dir=folder)
    if changes:
        raw = {k: v for k, v in (json.loads(path.read_text()) | changes).items() if v is not ...}
        path.write_text(json.dumps(raw, indent=1, sort_keys=True) + "\n")
    return path


def test_a_good_record(tmp_path: Path) -> None:
    path = record(tmp_path)
    assert not list(committed.problems(tmp_path, [SPEC])) and not committed.stale(tmp_path, [SPEC])
    assert '"seconds": 1.235e-05' in path.read_text() and path.stat().st_size < 4000
    record(tmp_path, "measured", "NVIDIA H200")
    assert not list(committed.problems(tmp_path, [SPEC]))
    record(tmp_path, templates="0" * 16, source="0" * 16)
    assert not list(committed.problems(tmp_path, [SPEC])), "stale is not wrong"
    assert committed.stale(tmp_path, [SPEC]) == [path.relative_to(tmp_path).as_posix()]
    record(tmp_path, templates="0" * 16)
    assert not committed.stale(tmp_path, [SPEC]), "the templates have changed, and the kernel has not"


@pytest.mark.parametrize("target", ["cpu-avx2", "sm_90"])
def test_a_kernel_whose_comments_alone_have_changed_is_the_same(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = known_target(target)
    backend = CpuBackend() if row.backend == "cpu" else TritonBackend()
    given = ("decode", SPEC, row, default_schedule(backend, "decode", SPEC, row, {}))
    now, rendered = source_digest(*given), render.render
    mark = "//" if row.backend == "cpu" else "#"
    monkeypatch.setattr(render, "render", lambda plan: rendered(plan) + f"{mark} in other words\n")
    assert source_digest(*given) == now
    monkeypatch.setattr(render, "render", lambda plan: rendered(plan) + "int_one = 1;\n")
    assert source_digest(*given) != now


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"how": "measured"}, "names its device"),
        ({"device": "NVIDIA H200"}, "names its device"),
        ({"device": "/dev/nvidia0", "how": "measured"}, "holds a path"),
        ({"effort": "see /srv/tune"}, "holds a path"),
        ({"schedule": {"tile": 1}}, "schedule has"),
        ({"target": "sm_80"}, "target is 'sm_80'"),
        ({"features": ...}, "is no tuning record"),
        ({"note": "x" * 20_000}, "bytes"),
        ({"kvgen": 7}, "not a text"),
    ],
    ids=str,
)
def test_what_is_not_fit_to_be_committed(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    record(tmp_path, **changes)
    (found,) = committed.problems(tmp_path, [SPEC])
    assert words in found


def test_a_record_of_no_example_and_one_that_is_not_sorted(tmp_path: Path) -> None:
    path = record(tmp_path)
    path.with_name("decode__00000000.json").write_text(path.read_text())
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(raw.items())), indent=1) + "\n")
    unknown, unsorted = sorted(committed.problems(tmp_path, [SPEC]))
    assert "no spec of examples/" in unknown and "sorted" in unsorted


@pytest.fixture
def shipped(tmp_path: Path, own_cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of the package's own records."""
    folder = tmp_path / "shipped"
    monkeypatch.setattr(
        store, "folders", lambda cache_dir: [(cache_dir or own_cache_dir / "tune", True), (folder, False)]
    )
    return folder


def test_a_build_takes_what_was_measured_before_what_was_predicted(
    shipped: Path, own_cache_dir: Path
) -> None:
    record(shipped, "measured", "NVIDIA H200")
    mine = record(own_cache_dir / "tune")
    raw = json.loads(mine.read_text())
    default = default_schedule(TritonBackend(), "decode", SPEC, GPU, {})
    raw["schedule"] = raw["buckets"]["1x512"]["schedule"] = default.to_dict()
    mine.write_text(json.dumps(raw))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntunedWarning)
        assert assemble(SPEC, "sm_90", tune="cache").schedules["decode"] != default
        raw["how"], raw["device"] = "measured", "mine"
        mine.write_text(json.dumps(raw))
        assert assemble(SPEC, "sm_90", tune="cache").schedules["decode"] == default, (
            "of equal ones the nearest"
        )


def test_tuning_for_a_gpu_takes_what_is_shipped(shipped: Path) -> None:
    record(shipped, "measured", "NVIDIA H200")
    (found,) = tuner.tune(SPEC, "sm_90", ops=("decode",)).ops
    assert found.cached and found.how == "measured"
    (reason,) = why(SPEC, GPU, effort="quick", ops=("decode",), pins={}, cache_dir=None)
    assert reason.hit and str(shipped) in reason.nearest


def test_a_record_of_another_cpu_is_a_start(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "Search", lambda *given, **options: (_ for _ in ()).throw(Started))
    target = resolve_target("cpu")
    space = load_space("cpp/decode")
    key = key_of("decode", SPEC, target, {}, space)
    tuned = default_schedule(CpuBackend(), "decode", SPEC, target, {}).replace(heads=1)
    path = store.write(
        store.Winners(tuned, {}, "measured", "quick", "Another CPU, 2 threads", "2026-01-02"),
        key,
        cache_dir=shipped,
    )
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"features": ["wings"]}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntunedWarning)
        warnings.simplefilter("error", paths.CacheWarning)
        assert assemble(SPEC, "cpu", tune="cache").schedules["decode"] == tuned
        found = store.find(key, space, spec_facts(SPEC, target))
    assert found is not None and found.elsewhere and found.device == "Another CPU, 2 threads"
    (reason,) = why(SPEC, target, effort="quick", ops=("decode",), pins={}, cache_dir=None)
    assert not reason.hit and {"features", "device"} <= {d.field for d in reason.differs}
    written = store.write(found, key)  # the same in this machine's own cache is a start too, and is told
    written.write_text(json.dumps(json.loads(written.read_text()) | {"features": ["wings"]}))
    with pytest.warns(paths.CacheWarning, match="it is a starting point only"), pytest.raises(Started):
        tuner.tune(SPEC, "cpu", ops=("decode",))


class Started(Exception):
    """The tuner began to search."""


def test_what_is_stale_is_said(shipped: Path) -> None:
    record(shipped, templates="0" * 16, source="0" * 16)
    (reason,) = why(SPEC, GPU, effort="quick", ops=("decode",), pins={}, cache_dir=None)
    assert not reason.hit and "the templates have changed (0000000000000000 -> " in str(reason)
    with pytest.warns(UntunedWarning, match="decode is stale"):
        assemble(SPEC, "sm_90", tune="cache")


def test_commit_copies_winners_of_this_machine(
    tmp_path: Path, own_cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "folders", lambda cache_dir: [(own_cache_dir / "tune", True)])
    record(own_cache_dir / "tune")
    tree = tmp_path / "tree"
    (written,) = committed.commit(SPEC, GPU, ("decode", "copy"), tree)
    assert written == tree / key_of("decode", SPEC, GPU, {}, space_of("decode", GPU)).file
    assert not list(committed.problems(tree, [SPEC]))
    record(own_cache_dir / "tune", templates="0" * 16, source="0" * 16)
    assert not committed.commit(SPEC, GPU, ("decode",), tmp_path / "other"), "stale ones are not"


def test_the_command(tmp_path: Path, repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = str(repo_root / "examples/llama3-8b-int8.toml")
    seen: list[str] = []
    monkeypatch.setattr(committed, "source_folder", lambda: tmp_path)
    monkeypatch.setattr(committed, "commit", lambda spec, target, ops, folder: seen.append(target.name) or [])
    monkeypatch.setattr(
        tuner,
        "tune",
        lambda spec, target, **given: tuner.TuneReport(spec.name, spec.hash, target, "quick", 0.1, ()),
    )
    record(tmp_path)
    done = CliRunner().invoke(app, ["tune", spec, spec, "--target", "sm_90", "--commit"])
    assert done.exit_code == 0, done.output
    assert seen == ["sm_90", "sm_90"] and "To commit: 0 records of sm_90" in done.output
    assert "wrong: sm_90/decode__" in done.output, "a record of no example is told"
    for option in (["--pin", "decode.tile=32"], ["--cache-dir", str(tmp_path)]):
        refused = CliRunner().invoke(app, ["tune", spec, "--commit", *option])
        assert refused.exit_code == 2 and "not with --commit" in refused.output


def test_an_installed_package_commits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committed.resources, "files", lambda name: tmp_path)
    with pytest.raises(ArgumentError, match="run it in a checkout"):
        committed.source_folder()
