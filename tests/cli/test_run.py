"""kvgen run and kvgen bench --model, on tiny random checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvgen.commands.run import alike
from kvgen.errors import ArgumentError
from kvgen.export.package import export
from kvgen.models.extras import installed
from kvgen.models.pages import specs_for
from kvgen.models.shape import read_config, shape_of
from kvgen.models.threads import using_threads
from tests.support.checkpoints import FAMILY_SHAPES, SHAPES, make_checkpoint
from tests.support.engines import library

pytestmark = pytest.mark.skipif(not installed("transformers"), reason="needs the extra 'models'")

Kvgen = Callable[..., Any]

SPEC = """
[attention]
q_heads = {q_heads}
kv_heads = 2
head_dim = 16
q_dtype = "bf16"

[cache]
page_size = 8
layout = "page kv tok head d"

[cache.k]
format = "bf16"

[cache.v]
format = "f16"
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), tokenizer=True, **SHAPES["gqa-tied"])


@pytest.fixture(scope="module")
def mute(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without a tokenizer."""
    return make_checkpoint(tmp_path_factory.mktemp("mute"), **SHAPES["gqa-tied"])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with using_threads(1):
        yield


def transformers_text(folder: Path, prompt: str, new: int) -> str:
    """What transformers alone goes on with."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    found = module.generate(ids, max_new_tokens=new, do_sample=False)
    return tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)


def test_one_prompt_prints_its_text_alone(kvgen: Kvgen, tiny: Path) -> None:
    done = kvgen("run", "--model", tiny, "Hello there", "--max-tokens", 12, "--page-size", 4)
    assert done.exit_code == 0, done.output
    assert done.stdout == transformers_text(tiny, "Hello there", 12) + "\n"
    assert "prefill (11)" in done.stderr
    assert re.search(r"12 tokens; first after [0-9.]+ s, [0-9.]+ tokens/s", done.stderr)


def test_several_prompts_say_whose_answer_comes(kvgen: Kvgen, tiny: Path) -> None:
    done = kvgen("run", "-m", tiny, "Hello there", "x", "-n", 12, "--page-size", 4)
    assert done.exit_code == 0, done.output
    first, second = (transformers_text(tiny, prompt, 12) for prompt in ("Hello there", "x"))
    assert done.stdout == f"\n[1] Hello there\n{first}\n\n[2] x\n{second}\n"


def test_json(kvgen_json: Kvgen, tiny: Path) -> None:
    report = kvgen_json("run", "-m", tiny, "Hello there", "--ids", "40,41 42", "-n", 5, "--page-size", 4)
    assert (report["model"], report["pages"], report["threads"]) == (tiny.name, "f32", 1)
    text, ids = report["answers"]
    assert text["text"] == transformers_text(tiny, "Hello there", 5)
    assert (text["prompt_tokens"], len(text["tokens"]), text["finished"]) == (11, 5, "length")
    assert ids["prompt_tokens"] == 3 and len(ids["text"]) <= 5
    assert report["prefill_s"] > 0 and report["decode_tokens_per_s"] > 0


def test_kernels_of_an_export(kvgen: Kvgen, tiny: Path, tmp_path: Path) -> None:
    spec = specs_for(shape_of(read_config(tiny), tiny), "f32", page_size=4)[0]
    export(spec, tmp_path / "out", targets=["cpu-portable"], name="kernels")
    for folder in (tmp_path / "out", tmp_path / "out" / "kernels"):
        done = kvgen("run", "-m", tiny, "Hello there", "-n", 12, "--library", folder)
        assert done.exit_code == 0, done.output
        assert done.stdout == transformers_text(tiny, "Hello there", 12) + "\n"
    done = kvgen("run", "-m", tiny, "x", "--library", tmp_path / "out", "--pages", "int8")
    assert done.exit_code == 2 and "--pages int8" in done.stderr
    (tmp_path / "empty").mkdir()
    done = kvgen("run", "-m", tiny, "x", "--library", tmp_path / "empty")
    assert done.exit_code != 0 and "kvgen export" in done.stderr


def test_a_model_whose_layers_differ(kvgen: Kvgen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = FAMILY_SHAPES["gemma3_text"]
    folder = make_checkpoint(tmp_path / "hybrid", family="gemma3_text", tokenizer=True, **shape)
    quick = lambda specs: [library("portable", spec) for spec in specs]  # noqa: E731
    monkeypatch.setattr("kvgen.models.kernels.built", quick)
    done = kvgen("run", "-m", folder, "Hello there", "-n", 12, "--page-size", 4)
    assert done.exit_code == 0, done.output
    assert done.stdout == transformers_text(folder, "Hello there", 12) + "\n"
    specs = specs_for(shape_of(read_config(folder), folder), page_size=4)
    with pytest.raises(ArgumentError, match="this model's layers need 1 more; leave it out"):
        alike(library("portable", specs[0]), specs)
    one = library("portable", specs[0])
    assert alike(one, specs[:1] * 3) == [one] * 3


def test_draws_repeat_with_their_seed(kvgen_json: Kvgen, tiny: Path) -> None:
    def drawn(seed: int) -> list[list[int]]:
        options = ["--temperature", 2, "--top-p", 0.95, "--seed", seed, "-n", 10, "--page-size", 4]
        return [a["tokens"] for a in kvgen_json("run", "-m", tiny, "same", "same", *options)["answers"]]

    assert drawn(3) == drawn(3) != drawn(5)
    assert len({tuple(tokens) for tokens in drawn(3)}) == 2, "equal prompts in a batch must differ"


def test_a_checkpoint_without_tokenizer(kvgen: Kvgen, kvgen_json: Kvgen, mute: Path) -> None:
    done = kvgen("run", "-m", mute, "Hello")
    assert done.exit_code == 2
    assert "no tokenizer" in done.stderr and "--ids" in done.stderr
    done = kvgen("run", "-m", mute, "--ids", "1,2,3", "-n", 4, "--page-size", 4)
    assert done.exit_code == 0, done.output
    assert re.fullmatch(r"\d+ \d+ \d+ \d+\n", done.stdout)
    (answer,) = kvgen_json("run", "-m", mute, "--ids", "1,2,3", "-n", 4, "--page-size", 4)["answers"]
    assert answer["text"] is None
    assert " ".join(map(str, answer["tokens"])) == done.stdout.strip()


def test_the_chat_template(kvgen_json: Kvgen, tiny: Path) -> None:
    options = ["-n", 4, "--page-size", 4]
    (chat,) = kvgen_json("run", "-m", tiny, "hi", "--chat", *options)["answers"]
    (plain,) = kvgen_json("run", "-m", tiny, "<hi>", *options)["answers"]
    assert chat == plain


def test_a_text_ends_with_the_models_own_token(kvgen_json: Kvgen, tmp_path: Path) -> None:
    shape = SHAPES["gqa-tied"]
    ends = {"eos_token_id": list(range(97))}
    folder = make_checkpoint(tmp_path / "ends", tokenizer=True, **shape, **ends)
    (answer,) = kvgen_json("run", "-m", folder, "x", "--page-size", 4)["answers"]
    assert (answer["finished"], len(answer["tokens"]), answer["text"]) == ("stop", 1, "")


def test_a_spec_of_ones_own(kvgen: Kvgen, kvgen_json: Kvgen, tiny: Path, tmp_path: Path) -> None:
    spec = tmp_path / "own.toml"
    spec.write_text(SPEC.format(q_heads=4))
    report = kvgen_json("run", "-m", tiny, "Hello", "--spec", spec, "-n", 4)
    assert report["pages"] == "own" and len(report["answers"][0]["tokens"]) == 4
    done = kvgen("run", "-m", tiny, "Hello", "--spec", spec, "--pages", "bf16")
    assert done.exit_code == 2 and "--pages bf16: --spec or --library says that already" in done.stderr
    spec.write_text(SPEC.format(q_heads=8))
    done = kvgen("run", "-m", tiny, "Hello", "--spec", spec)
    assert done.exit_code == 2 and "attention.q_heads = 8: the model has 4" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "PROMPT: none given"),
        (["x", "--top-p", "0.5"], "--temperature above 0"),
        (["x", "--pages", "int5"], "There are f32, bf16, int8"),
        (["--ids", "1,two"], "write token numbers with commas"),
        (["--ids", "1", "--chat"], "a template needs a text"),
        (["--ids", "97"], "token ids are 0 to 96"),
        (["x", "-n", "256"], "the model has positions for 256"),
        (["x", "--model", "smolm2"], "did you mean smollm2"),
        (["x", "--spec", "nothing.toml"], "no such file"),
        (["x", "--temperature", "1", "--top-p", "1.5"], "top_p = 1.5"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals(kvgen: Kvgen, tiny: Path, words: list[str], message: str) -> None:
    done = kvgen("run", *([] if "--model" in words else ["-m", tiny]), *words)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["run", "--ids", "1", "-n", "999999999"],
            "--max-tokens 999999999 after a prompt of 1: the model has",
        ),
        (["run", ""], "PROMPT: makes no token"),
    ],
)
def test_prompts_without_a_place_are_refused_before_anything_is_compiled(
    kvgen: Kvgen, tiny: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.setattr("kvgen.models.kernels.built", lambda spec: pytest.fail("it was compiled"))
    done = kvgen(*words, "-m", tiny)
    assert done.exit_code == 2 and message in done.stderr


@pytest.mark.parametrize("words", [["run", "x"], ["bench"]], ids=" ".join)
def test_unknown_pages_are_refused_before_anything_is_loaded(
    kvgen: Kvgen, tiny: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr("kvgen.models.session.load", lambda *given, **more: pytest.fail("it was loaded"))
    done = kvgen(*words, "-m", tiny, "--pages", "int5")
    assert (
        done.exit_code == 2
        and "--pages int5: no such pages; did you mean int8? There are f32, bf16, int8" in done.stderr
    )


def test_prompts_are_utf8_whatever_the_locale(kvgen_json: Kvgen, kvgen: Kvgen, tiny: Path) -> None:
    """As Python hands over bytes that the locale lacks: as lone surrogates."""
    foreign = "größer".encode().decode("ascii", "surrogateescape")
    first, second = (
        kvgen_json("run", "-m", tiny, word, "-n", 3)["answers"][0] for word in (foreign, "größer")
    )
    assert first == second
    done = kvgen("run", "-m", tiny, "a\udcff\udcfe", "-n", 3)
    assert done.exit_code == 2
    assert r"PROMPT 'a\udcff\udcfe': byte 0xff at 1 is not UTF-8; give UTF-8 text" in done.stderr
    done = kvgen("run", "-m", tiny, "\ud800", "-n", 3)
    assert done.exit_code == 2 and "is no character" in done.stderr


def test_folders_that_are_refused(kvgen: Kvgen, tmp_path: Path) -> None:
    done = kvgen("run", "-m", tmp_path, "--ids", "1")
    assert done.exit_code == 2 and "no config.json" in done.stderr
    (tmp_path / "config.json").write_text('{"model_type": "llama", "sliding_window": 4096}')
    done = kvgen("run", "-m", tmp_path, "--ids", "1")
    assert done.exit_code == 2 and "sliding_window = 4096" in done.stderr
    folder = make_checkpoint(tmp_path / "odd", num_attention_heads=4, num_key_value_heads=2, head_dim=12)
    done = kvgen("run", "-m", folder, "--ids", "1")
    assert done.exit_code == 2 and "attention.head_dim = 12" in done.stderr


def test_bench_of_a_model(kvgen: Kvgen, kvgen_json: Kvgen, tiny: Path, mute: Path) -> None:
    words = ["bench", "--context", 12, "--max-tokens", 4, "--batch", 1, "--batch", 2, "--threads", 1]
    one, two = kvgen_json(*words, "-m", mute)
    assert (one["batch"], two["batch"], one["prompt"], one["new_tokens"]) == (1, 2, 12, 4)
    assert [row["contender"] for row in two["rows"]] == [
        "kvgen f32",
        "transformers eager",
        "transformers SDPA",
    ]
    done = kvgen(*words, "-m", tiny)
    assert done.exit_code == 0, done.output
    assert f"{tiny.name}: 2 x 12 + 4 tokens, 1 threads, 3 rounds" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "SPEC: none given"),
        (["x.toml", "--model", "smollm2"], "--model makes its own spec"),
        (["x.toml", "--pages", "int8"], "--pages: only a model has one"),
    ],
)
def test_bench_refusals(kvgen: Kvgen, words: list[str], message: str) -> None:
    done = kvgen("bench", *words)
    assert done.exit_code == 2 and message in done.stderr


def test_what_would_steer_a_terminal_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvgen.commands import output, run

    monkeypatch.setattr(output, "is_terminal", lambda: True)
    run._write("a\x1b[2Jb\x9b0m\n\té👩\u200d🚀")
    assert capsys.readouterr().out == "a[2Jb0m\n\té👩\u200d🚀"
