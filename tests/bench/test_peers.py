"""Peers: which there are, which run, and what is said of those that are not installed."""

from __future__ import annotations

import sys

import pytest

from kvgen.bench.cases import CASES, free
from kvgen.bench.contender import Contender, Scene, Shape
from kvgen.bench.expect import Expected
from kvgen.bench.peers.registry import PEERS, choose, missing
from kvgen.errors import ArgumentError
from tests.support.specs import make_spec

SHAPE = Shape(8, 2, 64, 64, 64**-0.5, True, None)


def judged(scene: Scene, contender: Contender, turn: int) -> bool:
    """Whether a call gives what it must."""
    contender.call(turn)
    return all(verdict.right for verdict in Expected(scene).judge(contender, turn))


def test_by_default_all_that_are_here_and_start_quickly() -> None:
    names = [peer.name for peer in choose([])]
    assert {"sdpa-folded", "sdpa-gqa", "gather+sdpa", "index_copy", "index"} <= set(names)
    assert "flex" not in names and "flex" in [peer.name for peer in choose(["all"])]
    assert choose([], no_peers=True) == []
    assert [peer.name for peer in choose(["flex,index", "index"])] == ["flex", "index"]


def test_names_that_are_none() -> None:
    with pytest.raises(ArgumentError, match="did you mean sdpa-gqa"):
        choose(["sdpa-gpa"])
    with pytest.raises(ArgumentError, match="--no-peers"):
        choose(["index"], no_peers=True)


@pytest.mark.parametrize(("name", "package"), [("vllm-32", "vllm"), ("llama.cpp", "llama_cpp")])
def test_absent_ones_are_named_with_what_installs_them(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert not PEERS[name].installed
    assert PEERS[name] in missing() and PEERS[name] not in choose([])
    with pytest.raises(ArgumentError, match=rf"{package} is not installed; try: pip install"):
        choose([name])


def test_the_format_of_a_peer_follows_the_spec() -> None:
    def forms(name: str, **fields: str) -> str | None:
        return PEERS[name].format_of(make_spec(q_dtype="bf16", **fields))

    assert forms("sdpa-folded", format_k="int8-token", format_v="bf16") == "bf16"
    assert forms("vllm-32", format_k="int8-token", format_v="int8-token") == "fp8"
    assert forms("vllm-32", format_k="int8-token", format_v="bf16") == "bf16"
    assert forms("llama.cpp", format_k="int8-head", format_v="int8-head") == "q8_0"
    assert forms("llama.cpp", format_k="f16", format_v="bf16") is None


@pytest.mark.parametrize("form", ["bf16", "f16", "f32", "fp8", "q8_0", "q4_0"])
@pytest.mark.parametrize("name", [peer.name for peer in PEERS.values() if peer.package != "torch"])
def test_foreign_libraries_agree_with_the_oracle(name: str, form: str) -> None:
    """Where they are installed; elsewhere nobody is held against them."""
    peer = PEERS[name]
    if not peer.installed:
        pytest.skip(f"needs {peer.package} ({peer.install})")
    if (form in ("q8_0", "q4_0") and peer.package == "vllm") or (form == "fp8" and peer.package != "vllm"):
        pytest.skip("not one of its formats")
    for case in (*free([2], 70, None), *free([2], 70, 3), *free([1], 40, 40), CASES["append-8"]):
        if case.op in peer.ops:
            scene = Scene(case, SHAPE, 1, cold_bytes=1 << 16)
            contender = peer.make(scene, form)
            assert judged(scene, contender, contender.sets - 1 if case.op != "append" else 1)


@pytest.mark.slow
def test_flex_agrees_with_the_oracle() -> None:
    """It compiles for each shape."""
    for case in (*free([2], 200, None), *free([2], 200, 3), *free([1], 300, 300), *free([1], 300, 40)):
        scene = Scene(case, SHAPE, 1, cold_bytes=1 << 18)
        contender = PEERS["flex"].make(scene, "bf16")
        assert contender.sets > 1
        assert judged(scene, contender, contender.sets - 1), case
