"""AttentionSpec: what is computed; it knows nothing of memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvgen.ir.rope import RopeSpec

PARAM_DIMS = ("batch", "head", "q", "kv")
"""What a parameter may differ by: requests, query heads, query rows of the call, logical positions."""

PARAM_TYPES = ("f32", "i32", "i64", "bool", "bits")
"""Element types of parameters. ``bool`` is a byte of 0 or 1; ``bits`` are eight keys a byte, the first one in
the lowest bit, ``ceil(kv / 8)`` bytes along the last dimension."""


@dataclass(frozen=True)
class Param:
    """A tensor that every attention call brings beside q and the cache."""

    name: str
    dims: tuple[str, ...]
    """Its axes, outermost first, each of ``PARAM_DIMS`` at most once."""
    dtype: str
    """One of ``PARAM_TYPES``."""


@dataclass(frozen=True)
class AttentionSpec:
    """Softmax attention of ``q_heads`` query heads over ``kv_heads`` KV heads (GQA)."""

    q_heads: int
    """Query heads; a multiple of ``kv_heads``."""
    kv_heads: int
    """KV heads."""
    head_dim: int
    """Elements of a query or key row; a multiple of 8 from 16 to 576."""
    v_head_dim: int
    """Elements of a value row and of an output row; default ``head_dim``."""
    q_dtype: str
    """Type of q and of the output: ``bf16``, ``f16`` or ``f32``."""
    scale: float
    """Factor on q.k before softmax; default ``head_dim ** -0.5``."""
    causal: bool
    """Bottom-right aligned causal mask: query i sees keys <= kv_len - q_len + i."""
    window: int | None
    """Earlier keys kept beside the query's own (sliding window), or None for all."""
    qk: str
    """``exact``: the stored K, f32 accumulation. ``int8``: integer codes of K times the query, quantised to
    one int8 code per element with a scale per row (token and head)."""
    pv: str
    """``exact``: the stored V, f32 accumulation. ``int8``: integer codes of V times weights, quantised to
    eight bits relative to the largest of a tile."""
    options: tuple[tuple[str, Any], ...] = ()
    """Masks, score terms and sinks beyond ``causal`` and ``window``: keys of ``kvgen.variants`` with their
    values, sorted. A table is a tuple of sorted pairs."""
    params: tuple[Param, ...] = ()
    """What expressions read, sorted by name: declared in the spec, or by a registered definition."""
    rope: RopeSpec | None = None
    """Rotary position embedding of K in the kernels; None where the caller rotates, or nothing does."""

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads

    def option(self, key: str) -> Any:
        """The value of a mask, score or sink key; None where it is off."""
        if key in ("causal", "window"):
            return getattr(self, key)
        return dict(self.options).get(key)

    @property
    def sink(self) -> bool:
        """Whether each head has a learned logit beside its keys (``sink_logit``)."""
        return bool(self.option("sink_logit"))

    def param(self, name: str) -> Param:
        """The parameter called ``name``."""
        return next(param for param in self.params if param.name == name)
