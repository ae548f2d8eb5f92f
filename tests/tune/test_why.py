"""--why: a hit is told as one, a miss by the fields that made it; nothing is touched."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvgen.errors import ArgumentError
from kvgen.ir import Spec
from kvgen.resolve import resolve_target
from kvgen.tune import store
from kvgen.tune.device import device_name
from kvgen.tune.key import key_of
from kvgen.tune.space import space_of, spec_facts
from kvgen.tune.why import Reason, why
from tests.support.faults import small

TARGET = resolve_target("cpu")
SPACE = space_of("decode", TARGET)
FACTS = spec_facts(small(), TARGET)
DEFAULT = SPACE.default(TARGET, FACTS)


@pytest.fixture
def stored(tuning: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """Store winners of decode with some fields of the file changed."""
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path / "empty"))

    def write(spec: Spec | None = None, **changes: Any) -> Path:
        key = key_of("decode", spec or small(), TARGET, {}, SPACE)
        winners = store.Winners(DEFAULT, {}, "measured", "quick", device_name(TARGET), "2026-01-02")
        path = store.write(winners, key, cache_dir=tuning)
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return path

    return write


def ask(folder: Path, effort: str = "quick", pins: Any = None, target: str = "cpu") -> Reason:
    (reason,) = why(
        small(), resolve_target(target), effort=effort, ops=("decode",), pins=pins or {}, cache_dir=folder
    )
    return reason


def test_a_hit(tuning: Path, stored: Callable[..., Path]) -> None:
    path = stored()
    assert ask(tuning) == Reason("decode", True, str(path), str(path), ())


def test_nothing_stored(tuning: Path, nothing_shipped: None) -> None:
    reason = ask(tuning)
    assert not reason.hit and not reason.nearest and "no record" in str(reason)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"templates": "0" * 16, "source": "0" * 16}, "templates"),
        ({"space": "0" * 16}, "space"),
        ({"features": ["wings"]}, "features"),
        ({"device": "a toaster"}, "device"),
        ({"effort": "lazy"}, "effort"),
        ({"format": 1}, "format"),
    ],
)
def test_each_field_of_the_file_is_named(
    tuning: Path, stored: Callable[..., Path], changes: dict[str, Any], field: str
) -> None:
    path = stored(**changes)
    before = path.read_bytes()
    reason = ask(tuning)
    assert not reason.hit
    assert [found.field for found in reason.differs] == [field]
    assert field.rstrip("s") in str(reason) or field == "space"
    assert path.read_bytes() == before, "it is only looked at"
    assert reason.to_dict()["differs"][0]["field"] == field


def test_a_template_of_another_version_names_the_version(tuning: Path, stored: Callable[..., Path]) -> None:
    stored(templates="0" * 16, source="0" * 16, kvgen="0.0.1")
    assert [found.field for found in ask(tuning).differs] == ["templates", "kvgen"]


def test_what_is_asked_for_is_named(tuning: Path, stored: Callable[..., Path]) -> None:
    stored()
    assert [d.field for d in ask(tuning, effort="full").differs] == ["effort"]
    (pin,) = ask(tuning, pins={"decode": {"heads": 1}}).differs
    assert (pin.field, pin.stored, pin.wanted) == ("pins.heads", "absent", 1)
    names = [d.field for d in ask(tuning, target="cpu-portable").differs]
    assert names[0] == "target"


def test_the_nearest_record_is_compared(tuning: Path, stored: Callable[..., Path]) -> None:
    stored(small(window=9, head_dim=64, q_dtype="bf16"))
    near = stored(small(window=9))
    reason = ask(tuning)
    assert reason.nearest == str(near)
    (window,) = reason.differs
    assert window.field == "attention.window"
    assert (window.stored, window.wanted) == (9, "absent") or (window.stored, window.wanted) == (9, None)


@pytest.mark.parametrize("spoil", [{"schedule": None}, {"how": "guessed"}])
def test_a_record_that_tuning_would_set_aside(
    tuning: Path, stored: Callable[..., Path], spoil: dict[str, Any]
) -> None:
    path = stored(**spoil)
    reason = ask(tuning)
    assert not reason.hit and "is not what its name says" in str(reason)
    path.write_text("{")
    assert "no tuning record" in str(ask(tuning))
    assert path.exists()


def test_bad_requests_are_refused(tuning: Path) -> None:
    with pytest.raises(ArgumentError, match="effort"):
        ask(tuning, effort="heroic")
