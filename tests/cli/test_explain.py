"""``kvgen explain``: every stage, without a compiler but for the last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvgen
from kvgen.commands.explain import STAGES
from kvgen.commands.options import assembled, read_spec
from kvgen.ir.plan import OPS

INT8 = "examples/llama3-8b-int8.toml"


@pytest.mark.parametrize("target", ["cpu-avx512", "cpu-portable", "sm_90", "gfx942", "interpret"])
def test_all_stages_but_resources(kvgen_json: Any, target: str) -> None:
    data = kvgen_json("explain", INT8, "--target", target)
    assert [name for name in STAGES if name in data] == ["ir", "record", "address", "plan", "source"]
    assert kvgen.load_spec({k: v for k, v in data["ir"].items() if k != "hash"}).hash == data["hash"]
    assert data["plan"]["entry"] in data["source"] or target != "cpu-avx512"
    assert data["source"] == assembled(read_spec(INT8), target).source("decode")


@pytest.mark.parametrize("op", OPS)
def test_every_op(kvgen: Any, op: str) -> None:
    text = kvgen("explain", INT8, "--op", op).stdout
    for stage in ("ir", "record", "address", "plan", "source"):
        assert f"== {stage}: {op} of llama3-8b-int8" in text


def test_address_before_and_after(kvgen_json: Any, tmp_path: Path) -> None:
    spec = tmp_path / "packed.toml"
    text = Path(INT8).read_text().replace("int8", "bf16").replace("group = { tok = 1, head = 1 }", "")
    spec.write_text(text.replace('"page kv head tok d"', '"page kv head d/8 tok d%8"'))
    k = kvgen_json("explain", spec, "--stage", "address")["address"][0]
    assert k["raw"] == "page * k_stride_page + head * 2048 + (d // 8) * 128 + tok * 8 + (d % 8)"
    assert [term["wide"] for term in k["terms"]] == [True, False, False, False, False]
    assert [term["limit"] for term in k["terms"]][1:] == [14336, 1920, 120, 7]


def test_nested_splits_are_joined(kvgen_json: Any, tmp_path: Path) -> None:
    spec = tmp_path / "nested.toml"
    spec.write_text(Path(INT8).read_text().replace('"page kv head tok d"', '"page kv head tok d/8 d%8"'))
    k = kvgen_json("explain", spec, "--stage", "address")["address"][0]
    assert "//" in k["raw"] and "//" not in k["simplified"] and "%" not in k["simplified"]


def test_plan_shows_reasons_and_pins(kvgen_json: Any, kvgen: Any) -> None:
    plan = kvgen_json("explain", INT8, "--stage", "plan", "--pin", "decode.split_tokens=1024")["plan"]
    assert plan["schedule"]["split_tokens"] == 1024
    assert all(fact["reason"] for fact in plan["facts"])
    decisions = dict(plan["decisions"])
    assert decisions["K scale enters as"] == "a factor for each key, on its column of scores, by head"
    assert "score_scale" in kvgen("explain", INT8, "--stage", "plan").stdout


@pytest.mark.parametrize("target", ["cpu", "interpret"])
def test_resources(kvgen_json: Any, target: str) -> None:
    found = kvgen_json("explain", INT8, "--op", "copy", "--stage", "resources", "--target", target)[
        "resources"
    ]
    assert (found["bytes"] > 1000) if target == "cpu" else ("interpreter" in found["note"])


def test_resources_of_a_gpu_that_is_not_here(kvgen: Any) -> None:
    pytest.importorskip("triton")
    text = kvgen("explain", INT8, "--op", "merge", "--stage", "resources", "--target", "sm_90").stdout
    assert "registers" in text and "shared_bytes" in text and "loop.loads" in text


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--stage", "ptx"], "no such stage"),
        (["--op", "decod"], "did you mean decode?"),
        (["--op", "decode,append"], "one op at a time"),
        (["--target", "sm_91"], "did you mean"),
        (["--pin", "decode.tile"], "write op.knob=value"),
        (["--pin", "decode.warp=3"], "no such knob"),
        (["--pin", "decode.tile=x"], "give for example"),
        (["--variant", "tripple"], "no variant"),
    ],
)
def test_refusals(kvgen: Any, kvgen_json: Any, words: list[str], reason: str) -> None:
    result = kvgen("explain", INT8, *words)
    assert result.exit_code == 2
    assert reason in result.stderr and "Traceback" not in result.stderr
    assert reason in kvgen_json("explain", INT8, *words, exit_code=2)["error"]["message"]
