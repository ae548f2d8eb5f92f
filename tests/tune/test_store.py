"""Stored winners: found by what the op reads, checked field by field, and used as ``tune=`` says."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from kvgen import paths
from kvgen.backends.cpu.backend import CpuBackend
from kvgen.builder import assemble
from kvgen.ir import Schedule
from kvgen.resolve import resolve_target
from kvgen.tune import store
from kvgen.tune.bucket import Bucket
from kvgen.tune.choose import UntunedWarning
from kvgen.tune.defaults import default_schedule
from kvgen.tune.key import Key, key_of
from kvgen.tune.space import load_space, spec_facts
from tests.support.faults import small

SPEC = small()
TARGET = resolve_target("cpu")
SPACE = load_space("cpp/decode")
FACTS = spec_facts(SPEC, TARGET)
DEFAULT = default_schedule(CpuBackend(), "decode", SPEC, TARGET, {})
TUNED = DEFAULT.replace(heads=1)


def key() -> Key:
    return key_of("decode", SPEC, TARGET, {}, SPACE)


def winners(schedule: Schedule = TUNED) -> store.Winners:
    buckets = {
        "1x512": store.Best(schedule, 1e-5, 2e-5),
        "8x4096": store.Best(schedule.replace(heads=2), 1e-3, 1e-3),
    }
    return store.Winners(schedule, buckets, "measured", "quick", "some CPU", "2026-01-02")


def edited(folder: Path, **changes: Any) -> Path:
    """A stored file with some fields changed."""
    path = store.write(winners(), key(), cache_dir=folder)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def find(folder: Path) -> store.Winners | None:
    return store.find(key(), SPACE, FACTS, cache_dir=folder)


def test_what_is_written_is_found(tuning: Path) -> None:
    path = store.write(winners(), key(), cache_dir=tuning)
    assert path == tuning / TARGET.name / f"decode__{key().spec8}.json"
    assert find(tuning) == winners()
    text = path.read_text()
    assert text == json.dumps(json.loads(text), indent=1, sort_keys=True) + "\n"


def test_an_op_is_keyed_by_what_it_reads() -> None:
    def spec8(op: str, **attention: Any) -> str:
        return key_of(op, small(**attention), TARGET, {}, load_space(f"cpp/{op}")).spec8

    assert spec8("decode", scale=0.5) == spec8("decode"), "the scale is an argument of every launch"
    assert spec8("decode", window=9) != spec8("decode")
    assert spec8("copy", window=9, q_heads=8) == spec8("copy")
    assert spec8("merge", q_heads=8) != spec8("merge")
    assert spec8("append", q_heads=8) == spec8("append")


def test_the_nearest_bucket_answers() -> None:
    found = winners()
    assert found.at(None) == TUNED
    assert found.at(Bucket("decode", (1, 700)))["heads"] == 1
    assert found.at(Bucket("decode", (32, 2048)))["heads"] == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 99},
        {"op": "prefill"},
        {"target": "cpu-portable"},
        {"features": "wings"},
        {"reads": {}},
        {"how": "guessed"},
        {"date": 7},
        {"space": None},
        {"schedule": None},
        {"schedule": {**TUNED.to_dict(), "tile": 33}},
        {"schedule": {**TUNED.to_dict(), "heads": 8}},  # more heads than there are
        {"schedule": {**TUNED.to_dict(), "prefetch": True}},
        {"schedule": {**TUNED.to_dict(), "wings": 2}},
        {"buckets": []},
        {"buckets": {"large": {}}},
        {"buckets": {"1x1": {"schedule": TUNED.to_dict(), "seconds": -1.0}}},
        {"buckets": {"1x1": {"schedule": TUNED.replace(tile=256).to_dict(), "seconds": 1.0}}},
    ],
    ids=str,
)
def test_a_foreign_file_is_set_aside(tuning: Path, changes: dict[str, Any]) -> None:
    path = edited(tuning, **changes)
    with pytest.warns(paths.CacheWarning, match="is not what its name says"):
        assert find(tuning) is None
    assert not path.exists()
    assert path.with_name(path.name + ".bad-0").exists(), "never lost"


@pytest.mark.parametrize("text", ["", '{"format": 1, "op"', "[]", "\xff\xfe"])
def test_a_truncated_file_is_set_aside(tuning: Path, text: str) -> None:
    path = edited(tuning)
    path.write_text(text, encoding="latin-1")
    with pytest.warns(paths.CacheWarning):
        assert find(tuning) is None
    assert path.with_name(path.name + ".bad-0").exists()


def test_a_record_that_all_may_write_to_is_set_aside(tuning: Path) -> None:
    path = store.write(winners(), key(), cache_dir=tuning)
    path.chmod(0o666)
    with pytest.warns(paths.CacheWarning, match=r"everybody may write to .*set aside"):
        assert find(tuning) is None
    path.write_text("[" * 200_000)
    with pytest.warns(paths.CacheWarning, match="more than 64 brackets"):
        assert find(tuning) is None


def test_records_of_a_cache_that_all_may_write_to_are_not_read(own_cache_dir: Path) -> None:
    store.write(winners(), key())
    own_cache_dir.chmod(0o777)
    with pytest.warns(paths.CacheWarning, match="everybody may write to"):
        assert next(store.folders(None)) != (own_cache_dir / "tune", True)


def test_winners_of_other_templates_are_seeds(tuning: Path) -> None:
    edited(
        tuning,
        templates="0" * 16,
        source="0" * 16,
        schedule={**TUNED.to_dict(), "gone": 1, "tile": 99},
        buckets={},
    )
    found = find(tuning)
    assert found is not None
    assert found.stale
    assert found.schedule["heads"] == 1
    assert found.schedule["tile"] == SPACE.seeds["any"]["tile"], "a value that is gone falls back to the seed"


def test_winners_of_another_space_are_seeds_too(tuning: Path) -> None:
    edited(tuning, space="0" * 16)
    found = find(tuning)
    assert found is not None and found.stale


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.warns(paths.CacheWarning, match="cannot be written"):
        path = store.write(winners(), key(), cache_dir=blocked)
    assert path.exists()


def test_build_uses_the_cache_and_warns_once(own_cache_dir: Path) -> None:
    with pytest.warns(UntunedWarning, match=r"no tuned schedule for append, decode, prefill") as caught:
        library = assemble(SPEC, tune="cache")
    assert len(caught) == 1
    assert library.schedules["decode"] == DEFAULT
    store.write(winners(), key())
    with pytest.warns(UntunedWarning, match="append, prefill"):
        assert assemble(SPEC, tune="cache").schedules["decode"] == TUNED
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert assemble(SPEC, tune="off").schedules["decode"] == DEFAULT


def test_pins_win_over_the_cache(own_cache_dir: Path) -> None:
    store.write(winners(), key())
    with pytest.warns(UntunedWarning):
        agreeing = assemble(SPEC, tune="cache", schedule={"decode": {"heads": 1}})
    with pytest.warns(UntunedWarning):
        other = assemble(SPEC, tune="cache", schedule={"decode": {"heads": 2}})
    assert agreeing.schedules["decode"] == TUNED
    assert other.schedules["decode"]["heads"] == 2


def test_a_stale_record_is_said_to_be_one(own_cache_dir: Path) -> None:
    edited(own_cache_dir / "tune", templates="0" * 16, source="0" * 16)
    with pytest.warns(UntunedWarning, match="decode is stale"):
        assert assemble(SPEC, tune="cache").schedules["decode"] == TUNED


@pytest.mark.usefixtures("hurry")
def test_quick_fills_what_is_missing(own_cache_dir: Path, only: Any) -> None:
    only()
    store.write(winners(), key())
    with pytest.warns(paths.CacheWarning, match="was measured on 'some CPU'"):
        library = assemble(SPEC, tune="quick", backend=CpuBackend("-O1"))
    names = {path.name.split("__")[0] for path in (own_cache_dir / "tune").rglob("*.json")}
    assert names == {"append", "decode", "prefill", "merge", "copy", "gather"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = assemble(SPEC, tune="cache")
    assert again.schedules == library.schedules
