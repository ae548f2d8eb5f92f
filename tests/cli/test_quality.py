"""kvgen quality on a tiny random checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvgen.models.extras import installed
from kvgen.models.threads import using_threads
from tests.support.checkpoints import SHAPES, make_checkpoint

pytestmark = pytest.mark.skipif(not installed("transformers"), reason="needs the extra 'models'")

Kvgen = Callable[..., Any]

# Of another model: only its cache and arithmetic are used.
SPEC = """
[attention]
q_heads = 8
kv_heads = 1
head_dim = 128
window = 9
qk = "int8"

[cache]
page_size = 8
layout = "page kv tok head d"
k = { format = "int8" }
v = { format = "f16" }
"""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with using_threads(1):
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), tokenizer=True, **SHAPES["gqa-tied"])


@pytest.fixture
def words(tiny: Path, tmp_path: Path) -> list[object]:
    """A command without specs."""
    text = tmp_path / "text"
    text.write_text("Some words, " * 12)
    return ["quality", "-m", tiny, "--text", text, "--tokens", 100, "--context", 64]


def test_presets_and_specs(kvgen: Kvgen, kvgen_json: Kvgen, words: list[object], tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(SPEC)
    report = kvgen_json(*words, "bf16", "int8", own)
    bf16, int8, mine = report["rows"]
    assert (report["tokens"], report["context"], report["chunk"]) == (100, 64, 64)
    assert [row["pages"] for row in report["rows"]] == ["bf16", "int8", "own"]
    assert 0 < bf16["kl_nats"] < int8["kl_nats"]
    assert mine["kl_nats"] > 0 and mine["bits"] == (8 + 2 + 16) / 2
    done = kvgen(*words, "int8", "--chunk", 16)
    assert done.exit_code == 0, done.output
    title, head, f32, row = done.stdout.strip().splitlines()
    assert title.endswith(": 100 tokens in contexts of 64, 16 at a time")
    assert head.split()[:3] == ["pages", "KL", "nats"]
    assert (f32.split()[0], row.split()[0]) == ("f32", "int8")
    assert row.split()[-2:] == ["10", "10"]


def test_a_plot(kvgen: Kvgen, words: list[object], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = kvgen(*words, "f32", "bf16", "int8", "--plot", tmp_path / "loss.svg")
    assert done.exit_code == 0, done.output
    assert "KL to f32 pages" in (tmp_path / "loss.svg").read_text()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["int5"], "SPEC int5: no such pages; did you mean int8? There are f32, bf16, int8"),
        (["none.toml"], "no such file"),
        (["--plot", "loss.jpg"], "--plot loss.jpg: give a name that ends in .png, .svg or .pdf"),
        (["--q-dtype", "f64"], "--q-dtype f64: no such type; did you mean f32? There are f32, bf16, f16"),
        (["examples/llama3-8b-int8.toml", "--page-size", 8], "--page-size 8: examples/llama3-8b-int8.toml"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_are_found_before_anything_is_loaded(
    kvgen: Kvgen, words: list[object], monkeypatch: pytest.MonkeyPatch, more: list[object], message: str
) -> None:
    monkeypatch.setattr("kvgen.models.session.load", lambda *given, **rest: pytest.fail("it was loaded"))
    done = kvgen(*words, *more)
    assert done.exit_code == 2 and message in done.stderr


def test_texts_and_models_that_are_refused(
    kvgen: Kvgen, words: list[object], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (tmp_path / "text").write_bytes(b"caf\xe9")
    done = kvgen(*words)
    assert done.exit_code == 2 and "not UTF-8" in done.stderr
    mute = make_checkpoint(tmp_path_factory.mktemp("mute"), **SHAPES["gqa-tied"])
    done = kvgen("quality", "-m", mute)
    assert done.exit_code == 2 and "no tokenizer" in done.stderr


def test_a_text_that_never_ends_is_not_read_to_its_end(kvgen: Kvgen, tiny: Path) -> None:
    done = kvgen("quality", "-m", tiny, "--text", "/dev/zero", "bf16")
    assert done.exit_code == 2 and "--text /dev/zero: more than 67,108,864 bytes; give a part" in done.stderr
