"""given: what a cache cannot find by itself: scales of whole tensors or heads, outer scales, the mean of K.

An append scales blocks of the tokens that it gets. What holds for all tokens must be known before: a caller
gives it to ``new_cache`` or ``adopt``, and it lies outside the pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgen.errors import ArgumentError, brief
from kvgen.ir import Spec
from kvgen.ir.codec import CODECS
from kvgen.ir.quant import ZERO_BLOCK_AMAX
from kvgen.runtime import places

if TYPE_CHECKING:
    import torch

MEAN = "k_mean"
F32_MAX = float(np.finfo(np.float32).max)


def given_names(spec: Spec) -> tuple[str, ...]:
    """Names of the tensors that a caller gives, in the order of the ABI."""
    scales = tuple(name for name, _, _ in spec.given_scales())
    return (*scales, MEAN) if spec.cache.k.mean else scales


def arguments_of(names: Mapping[str, Any]) -> dict[str, Any]:
    """``scales=`` and ``means=`` that give these tensors: the inverse of ``bind_given`` for one layer."""
    scales = {name.rpartition("_")[0]: tensor for name, tensor in names.items() if name != MEAN}
    return {"scales": scales or None, "means": {"k": names[MEAN]} if MEAN in names else None}


def bind_given(
    spec: Spec, scales: Any, means: Any, device: Any, layers: int = 1
) -> list[dict[str, torch.Tensor]]:
    """The given tensors of each layer by ABI name, as f32 on ``device``.

    ``scales``: by the plane they scale (``k``, ``v``; of further segments ``k1``, ...), one number or one for
    each KV head; ``means``: ``{"k": (kv_heads, head_dim)}``. Each for all layers, or with a first dimension
    of layers. Raises ``ArgumentError`` for missing, surplus and unusable ones.
    """
    scales = _mapping("scales", scales, "{'k': tensor, 'v': tensor}")
    means = _mapping("means", means, "{'k': tensor}")
    wanted = {name.rpartition("_")[0]: (name, per_head) for name, _, per_head in spec.given_scales()}
    _refuse_surplus(spec, scales, wanted)
    found: list[dict[str, torch.Tensor]] = [{} for _ in range(layers)]
    for plane, (name, per_head) in wanted.items():
        count = spec.attention.kv_heads if per_head else 1
        label = f"scales[{plane!r}]"
        if scales.get(plane) is None:
            raise ArgumentError(f"{label}: missing; {_reason(plane, name, count)}")
        tensor = _numbers(label, scales[plane], count, layers, device)
        # Below that, 1 / scale is no number to round with.
        if not bool((tensor.isfinite() & (tensor >= ZERO_BLOCK_AMAX)).all()):
            shown = brief(tensor.flatten().tolist())
            raise ArgumentError(f"{label} = {shown}: every scale must be finite and at least 2**-100")
        most = _largest(spec, plane, name)
        if not bool((tensor.double() * most).max() <= F32_MAX):
            shown, limit = brief(tensor.flatten().tolist()), F32_MAX / most
            reason = f"times {most:g}, the largest that it multiplies, is beyond f32"
            raise ArgumentError(f"{label} = {shown}: {reason}; give scales of at most {limit:.3g}")
        for at, own in enumerate(found):
            own[name] = tensor[at % len(tensor)]
    for key in means:
        if key != "k" or not spec.cache.k.mean:
            hint = "this spec subtracts none (cache.k.mean); leave means out"
            raise ArgumentError(f"means[{brief(key)}]: {hint if key == 'k' else 'only K has a mean; give k'}")
    if spec.cache.k.mean:
        if means.get("k") is None:
            raise ArgumentError("means['k']: missing; give the mean of K, (kv_heads, head_dim) f32")
        tensor = _mean(spec, means["k"], layers, device)
        for at, own in enumerate(found):
            own[MEAN] = tensor[at % len(tensor)]
    return found


def _largest(spec: Spec, plane: str, name: str) -> float:
    """The largest magnitude that a scale multiplies: a code's, or below an outer one a scaled code's."""
    (part,) = (p for side in spec.cache.fields for p in spec.segments(side) if p.plane == plane)
    code, scale = float(part.quant.fmt.qmax or 1.0), part.quant.scale_dtype
    return code * float(CODECS[scale].qmax or 1.0) if name.endswith("_outer") and scale in CODECS else code


def _mapping(name: str, value: Any, hint: str) -> Mapping[Any, Any]:
    found = {} if value is None else value
    if not isinstance(found, Mapping):
        raise ArgumentError(f"{name} = {brief(found)}: give a mapping, {hint}")
    return found


def _reason(plane: str, name: str, count: int) -> str:
    what = f"{count} positive f32 scales, one a KV head" if count > 1 else "one positive f32 scale"
    if name.endswith("_outer"):
        return f"the outer scale of {plane}, which all its stored scales are in units of: give {what}"
    reason = "cannot be computed by an append (its group spans tokens)"
    return f"the scale of {plane} {reason}: give {what}"


def _refuse_surplus(spec: Spec, scales: Mapping[Any, Any], wanted: Mapping[str, Any]) -> None:
    formats = {part.plane: part.quant.format for side in spec.cache.fields for part in spec.segments(side)}
    for key, value in scales.items():
        if not isinstance(key, str) or key not in formats:
            names = " and ".join(map(repr, wanted or formats))
            raise ArgumentError(f"scales[{brief(key)}]: give scales for {names}")
        if key not in wanted and value is not None:
            raise ArgumentError(f"scales[{key!r}]: {formats[key]} here has no static scales; leave them out")


def _mean(spec: Spec, value: Any, layers: int, device: Any) -> torch.Tensor:
    """The mean of K as (1 or layers, kv_heads, head_dim)."""
    import torch

    label, shape = "means['k']", (spec.attention.kv_heads, spec.attention.head_dim)
    if not isinstance(value, torch.Tensor | np.ndarray):
        raise ArgumentError(f"{label} = {brief(value)}: give a tensor of {shape}")
    _need_real(label, value)
    if isinstance(value, torch.Tensor):
        places.need_tensor(label, value)
        places.need_memory(label, value)
        value = value.detach()
    if tuple(value.shape) not in (shape, (layers, *shape)):
        more = f" (or {(layers, *shape)})" if layers > 1 else ""
        raise ArgumentError(f"{label}: shape {tuple(value.shape)}, but the spec has {shape}{more}")
    mean = torch.as_tensor(value, dtype=torch.float32, device=device).reshape(-1, *shape).contiguous()
    if not bool(mean.isfinite().all()):
        raise ArgumentError(f"{label}: holds NaN or inf; give finite numbers")
    return mean


def _need_real(name: str, value: Any) -> None:
    """Refuse complex numbers, of which torch would drop a half with a warning."""
    if "complex" in str(getattr(value, "dtype", "")):
        raise ArgumentError(f"{name}: complex numbers; give real ones")


def _numbers(name: str, value: Any, count: int, layers: int, device: Any) -> torch.Tensor:
    """``count`` numbers for all layers or for each, in a list, an array or a tensor, as (1 or layers, count)
    f32 on ``device``."""
    import torch

    if isinstance(value, torch.Tensor):
        places.need_tensor(name, value)
        places.need_memory(name, value)
        value = value.detach()
    else:
        flat = list(value) if isinstance(value, list | tuple) else [value]
        if not isinstance(value, np.ndarray) and not all(isinstance(x, Real) for x in flat):
            raise ArgumentError(f"{name} = {brief(value)}: give numbers, or a tensor of them")
    _need_real(name, value)
    size = value.numel() if isinstance(value, torch.Tensor) else np.size(value)
    if size not in (count, layers * count):  # before any copy: an expanded tensor may be of any size
        more = f" ({layers * count} for all layers)" if layers > 1 else ""
        raise ArgumentError(f"{name}: {size} values, but the spec has {count}{more}")
    try:
        found = torch.as_tensor(value, dtype=torch.float32, device=device)
        return found.reshape(-1, count).contiguous()
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ArgumentError(f"{name} = {brief(value)}: give numbers, or a tensor of them") from None
