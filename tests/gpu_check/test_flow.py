"""The check of a GPU from end to end, against a driver that runs nothing: all but the results."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from kvgen.backends.triton.driver import Driver
from kvgen.builder import assemble
from kvgen.errors import ArgumentError, ToolchainError, UnsupportedError
from kvgen.gpu_check import check as checks
from kvgen.gpu_check import compare, conform, folder, tuning
from kvgen.gpu_check.prepare import prepare
from kvgen.tune import store
from kvgen.tune.check import Verdict
from kvgen.tune.key import key_of
from kvgen.tune.space import space_of, spec_facts
from tests.support.specs import make_spec
from tests.support.standin import StandIn

SPEC = make_spec("bf16", "bf16", page_size=16, kv_heads=2, group=4, head_dim=64, q_dtype="bf16")
OPS = ("append", "decode", "gather")
MOST = {"append": 2, "decode": 1, "gather": 1}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gpu")
    default = assemble(SPEC, "sm_90").schedules["decode"]
    other = default.replace(num_warps=4 if default["num_warps"] != 4 else 2)
    prepare(made, [SPEC], "sm_90", most=MOST, ops=OPS, also={"decode": [other]})
    return made


@pytest.fixture
def standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn(tmp_path / "calls", monkeypatch)


@pytest.fixture
def mine(prepared: Path, tmp_path: Path) -> Path:
    """A copy of the prepared folder that a test may change."""
    return shutil.copytree(prepared, tmp_path / "mine")


def rehearse(folder: Path, standin: StandIn, **options: Any) -> dict[str, Any]:
    return checks.check(folder, driver=Driver(standin.library), device="cpu", copy_bytes=4096, **options)


def test_what_is_prepared(prepared: Path) -> None:
    (found,) = folder.read(prepared).prepared
    assert found.spec == SPEC and set(found.digests) == set(OPS)
    decode = found.of("decode")
    assert decode[0].default and len(decode) == len({c.schedule for c in decode}) == 2
    assert {c.schedule for c in found.of("decode", "multi")} == {c.schedule for c in decode}
    append = found.of("append")
    assert append[0].default and len(append) == 2 and all(c.predicted for c in append)
    assert {c.plan.variant for c in found.candidates if c.plan.op == "append"} == {"bf16", "f16", "f32"}
    files = {binary.file.path for c in found.candidates for binary in c.binaries}
    assert {p.relative_to(prepared).as_posix() for p in prepared.glob("cubin/*")} == files
    text = (prepared / "manifest.json").read_text()
    assert str(prepared) not in text and "/tmp" not in text


def test_what_is_prepared_is_held_to_its_spec_and_its_folder(mine: Path) -> None:
    text = (mine / folder.NAME).read_text()

    def resealed(where: str, **changes: Any) -> None:
        body = json.loads(text)
        row = body["prepared"][0]
        row["record"]["planes"][0]["axes"][-1] |= changes if where == "record" else {}
        row["candidates"][0]["binaries"][0]["file"] |= changes if where == "file" else {}
        (mine / folder.NAME).write_text(json.dumps(folder.sealed(body)))

    resealed("record", extent=8)
    with pytest.raises(ToolchainError, match=r"damaged .VerifyError: plane k"):
        folder.read(mine)
    for change, reason in (
        ({"path": "../x"}, "leads out of the folder"),
        ({"size": 7}, "bytes instead of 7"),
    ):
        resealed("file", **change)
        binary = folder.read(mine).prepared[0].candidates[0].binaries[0]
        with pytest.raises(ToolchainError, match=reason):
            binary.part(mine)
    (mine / folder.NAME).chmod(0o666)
    with pytest.raises(ToolchainError, match="not loaded, because everybody may write to"):
        folder.read(mine)


def test_a_gpu_that_computes_nothing_fails_conformance(mine: Path, standin: StandIn) -> None:
    found = rehearse(mine, standin)
    (spec,) = found["specs"]
    assert not spec["conforms"] and not spec["tuned"] and not spec["records"] and not spec["rows"]
    assert {(c["op"], c["ok"]) for c in spec["checks"]} == {(op, False) for op in OPS}
    assert any("NaN" in c["message"] for c in spec["checks"] if c["op"] == "decode")
    assert {"what": f"{SPEC.name}: tuning and timing", "reason": "conformance failed"} in found["skipped"]
    assert json.loads((mine / "result.json").read_text()) == found
    assert not (mine / "autotune_cache").exists()
    names = {call["name"] for call in standin.calls("cuLaunchKernel")}
    assert len(names) >= 3, "every kernel was launched"


@pytest.fixture
def all_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that run nothing are called right, and workloads are small: the rest is rehearsed too."""
    monkeypatch.setattr(
        conform, "check_op", lambda lib, op, variant: Verdict(op, variant, True, "", 0.0, 1.0, 1)
    )
    monkeypatch.setattr(
        tuning, "BUCKETS", {"decode": ((1, 64), (2, 48)), "append": ((8,),), "gather": ((1, 64),)}
    )
    monkeypatch.setattr(compare, "FLEX_S", 1e6)  # its compiler takes half a minute
    monkeypatch.setattr(compare, "CASES", {"decode": ((2, 48),), "append": ((8,),)})


@pytest.mark.usefixtures("all_right")
def test_the_rest_of_the_way(mine: Path, standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    found = rehearse(mine, standin)
    (spec,) = found["specs"]
    assert spec["conforms"] and [t["op"] for t in spec["tuned"]] == ["decode", "append", "gather"]
    decode = spec["tuned"][0]
    assert all(set(row) == {"schedule", "1x64", "2x48"} for row in decode["times"])
    assert decode["winner"] == decode["default"], "equal times replace nothing"
    ours = [(r["op"], r["case"]) for r in spec["rows"] if r["contender"] == "kvgen"]
    assert ours == [("decode", "2x48"), ("append", "8")]
    # The stand-in's outputs are nothing like SDPA's, and that is said.
    assert any("differs from ours" in skip["reason"] for skip in found["skipped"])
    assert any("flex" in skip["what"] and "are left" in skip["reason"] for skip in found["skipped"])
    assert any(r["contender"].startswith("torch index_copy_") for r in spec["rows"])

    target = folder.read(mine).prepared[0].candidates[0].plan.target
    keys = {op: key_of(op, SPEC, target, {}, space_of(op, target)) for op in ("decode", "append", "gather")}
    assert spec["records"] == [f"autotune_cache/{key.file}" for key in keys.values()]
    key, space = keys["decode"], space_of("decode", target)
    kept = store.find(key, space, spec_facts(SPEC, target), cache_dir=mine / "autotune_cache")
    assert kept is not None and not kept.stale
    assert (kept.how, kept.device) == ("measured", "Stand-in GPU") and set(kept.buckets) == {"1x64", "2x48"}


@pytest.mark.usefixtures("all_right")
def test_a_candidate_that_is_wrong_does_not_race(
    mine: Path, standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = folder.read(mine).prepared[0].of("decode")[1].schedule

    def verdict(lib: Any, op: str, variant: str) -> Verdict:
        wrong = op == "decode" and lib.candidate(op, variant).schedule == bad
        return Verdict(op, variant, not wrong, "case", 1.0, 1.0, 1, "wrong" if wrong else "")

    monkeypatch.setattr(conform, "check_op", verdict)
    (spec,) = rehearse(mine, standin)["specs"]
    raced = [row["schedule"] for row in spec["tuned"][0]["times"]]
    assert bad.to_dict() not in raced and len(raced) == len(folder.read(mine).prepared[0].of("decode")) - 1


@pytest.mark.usefixtures("all_right")
def test_a_budget_that_is_used_up_is_told(mine: Path, standin: StandIn) -> None:
    found = rehearse(mine, standin, budget_s=0.0)
    (spec,) = found["specs"]
    assert not spec["checks"] and not spec["tuned"] and not spec["rows"]
    assert any(
        "check decode single" in skip["what"] and "are left" in skip["reason"] for skip in found["skipped"]
    )


def test_a_launch_that_fails_is_a_verdict(mine: Path, standin: StandIn) -> None:
    standin.fail("cuLaunchKernel", 701)
    (spec,) = rehearse(mine, standin)["specs"]
    assert all("cuLaunchKernel: error 701" in check["message"] for check in spec["checks"])


def test_what_is_refused(
    mine: Path, standin: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ToolchainError, match="prepare the folder again"):
        rehearse(tmp_path / "nothing", standin)
    with pytest.raises(UnsupportedError, match="give an NVIDIA target"):
        prepare(tmp_path / "amd", [SPEC], "gfx942")
    with pytest.raises(ArgumentError, match="none given"):
        prepare(tmp_path / "none", [], "sm_90")
    if not torch.cuda.is_available():
        with pytest.raises(ToolchainError, match="can use no GPU here"):
            checks.check(mine)
    monkeypatch.setenv("KVGEN_STANDIN_CC", "80")
    with pytest.raises(UnsupportedError, match=r"made for sm_90, and the GPU here is Stand-in GPU \(sm_80\)"):
        rehearse(mine, standin)
    monkeypatch.delenv("KVGEN_STANDIN_CC")
    cubin = next(mine.glob("cubin/*"))
    cubin.write_bytes(cubin.read_bytes()[:-1])
    binaries = [b for p in folder.read(mine).prepared for c in p.candidates for b in c.binaries]
    cut = next(b for b in binaries if b.file.path.endswith(cubin.name))
    with pytest.raises(ToolchainError, match=r"not the file that manifest\.json vouches for"):
        cut.part(mine)
    manifest = mine / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"num_warps": ', '"num_warps": 1', 1))
    with pytest.raises(ToolchainError, match="its sha256 differs"):
        rehearse(mine, standin)
