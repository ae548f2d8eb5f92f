"""AttentionSpec: what is computed; it knows nothing of memory."""

from __future__ import annotations

from dataclasses import dataclass


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

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads
