"""calibrate: what a cache is given and cannot find by itself, measured on a text.

Scales of whole tensors or heads, outer scales and the mean of K hold for every token, so they come from a
run over some tokens on f32 pages. Later tokens that are larger are cut off at the codec's largest number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvgen.ir import QuantSpec, Spec
from kvgen.ir.codec import CODECS
from kvgen.ir.quant import ZERO_BLOCK_AMAX
from kvgen.models.kernels import built
from kvgen.passes.validate import load_spec
from kvgen.runtime.base import Tensor
from kvgen.runtime.layers import new_layers
from kvgen.runtime.reopen import hadamard
from kvgen.runtime.sequence import PagedSequence, PageStore
from kvgen.runtime.step import Rows, build_step

if TYPE_CHECKING:
    from kvgen.models.adaptor import TransformersModel
    from kvgen.models.pages import ModelSpecs


@dataclass(frozen=True)
class Given:
    """``scales`` and ``means`` as ``new_layers`` takes them, with a first dimension of layers."""

    scales: dict[str, Tensor] | None = None
    means: dict[str, Tensor] | None = None


def calibrate(model: TransformersModel, specs: ModelSpecs, tokens: Sequence[int]) -> Given:
    """The scales and means of every layer's cache from what ``tokens`` leave in it, where it needs any.

    A static scale is the largest magnitude over the codec's, an outer one the largest over what codes and
    their stored scales reach together; both of rows as they are stored, centred and rotated.
    """
    if not any(spec.given_scales() or spec.cache.k.mean for spec in specs):
        return Given()
    found: dict[str, list[Tensor]] = {}
    means = []
    for spec, rows in zip(specs, _rows(model, specs, tokens), strict=True):
        if spec.cache.k.mean:
            means.append(rows["k"].mean(0))
            rows["k"] = rows["k"] - means[-1]
        for side in spec.cache.fields:
            own = hadamard(rows[side]) if spec.cache.quant(side).transform == "hadamard" else rows[side]
            for part in spec.segments(side):
                values = own[..., part.start : part.start + part.size].abs()
                if part.quant.static_scale:
                    scale = _largest(values, part.quant.scale_dims) / part.quant.steps
                elif part.quant.outer is not None:
                    scale = _largest(values, part.quant.outer) / (part.quant.steps * _reach(part.quant))
                else:
                    continue
                found.setdefault(part.plane, []).append(scale.clamp_min(ZERO_BLOCK_AMAX))
    return Given(
        {plane: _stacked(each) for plane, each in found.items()} or None,
        {"k": _stacked(means)} if means else None,
    )


def _rows(model: TransformersModel, specs: ModelSpecs, tokens: Sequence[int]) -> list[dict[str, Tensor]]:
    """K and V of each layer, (tokens, kv_heads, d) f32, as an append gets them."""
    import torch

    plain = built([_unquantised(spec) for spec in specs])
    page = plain[0].spec.cache.page_size
    store = PageStore(new_layers(plain, -(-len(tokens) // page), layers=model.num_layers))
    sequence = PagedSequence(store)
    sequence.reserve(len(tokens))
    step = build_step([Rows(sequence, tokens, sample=True)])
    model.forward(step, store.layers)
    gathered = [
        layer.library.gather(layer.cache, step.page_table_BP, step.kv_lens_B, dtype=torch.float32)
        for layer in store.layers
    ]
    return [{"k": k, "v": v} for k, v in gathered]


def _unquantised(spec: Spec) -> Spec:
    """The same attention over pages that keep K and V as they come."""
    table = spec.to_dict()
    exact = {"qk": "exact", "pv": "exact", "q_dtype": "f32"}
    side = {"format": "f32"}
    cache = {
        "page_size": spec.cache.page_size,
        "k": side,
        "v": table["cache"]["v"] if spec.cache.alias else side,
    }
    return load_spec({"name": "f32", "attention": table["attention"] | exact, "cache": cache})


def _largest(values_THD: Tensor, dims: Sequence[str]) -> Tensor:
    """The largest magnitude of each head, or of all as one number."""
    largest_H = values_THD.amax((0, 2))
    return largest_H if "head" in dims else largest_H.amax(0, keepdim=True)


def _reach(quant: QuantSpec) -> float:
    """The largest stored scale where its type has a narrow range, else 1."""
    return CODECS["e4m3"].qmax or 1.0 if quant.scale_dtype == "e4m3" else 1.0


def _stacked(each: list[Any]) -> Tensor:
    import torch

    return torch.stack(each)
