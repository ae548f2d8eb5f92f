"""params: the tensors that masks, scores, sinks and rope read, checked and named as kernels take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvgen.errors import ArgumentError, brief
from kvgen.ir import Param
from kvgen.runtime import arguments as check

SINK = Param("sink_logit", ("head",), "f32")
ROPE = Param("rope_table", ("kv", "d"), "f32")
"""Angles of each position: (positions, rotary elements)."""


def bind(
    wanted: Sequence[Param], given: Any, sizes: Mapping[str, int], device: Any, *, kv: int = 1
) -> dict[str, Any]:
    """Values by ABI name for the parameters that a kernel reads.

    ``given``: the caller's ``params``; ``sizes``: elements along batch, head, q and d; ``kv``: positions that
    will be read. Raises ``ArgumentError`` for what is missing, unknown, or of another type or shape.
    """
    if given is None:
        given = {}
    reads = ", ".join(param.name for param in wanted)
    if not isinstance(given, Mapping):
        raise ArgumentError(f"params = {brief(given)}: give a mapping of names to tensors ({reads})")
    names = {param.name for param in wanted}
    for name in given:
        if name not in names:
            hint = f"it reads {reads}" if reads else "leave params out"
            raise ArgumentError(f"params[{brief(name)}]: this op reads no such parameter; {hint}")
    values: dict[str, Any] = {}
    for param in wanted:
        if param.name not in given:
            raise ArgumentError(f"params[{param.name!r}]: missing; give a tensor of {' x '.join(param.dims)}")
        tensor = given[param.name]
        _check(param, tensor, sizes, device, kv)
        values[f"param_{param.name}"] = tensor
        for at, dim in enumerate(param.dims[:-1]):
            values[f"param_{param.name}_stride_{dim}"] = tensor.stride(at)
    return values


def _check(param: Param, tensor: Any, sizes: Mapping[str, int], device: Any, kv: int) -> None:
    import torch

    label = f"params[{param.name!r}]"
    kinds = {
        "f32": (torch.float32,),
        "i32": (torch.int32,),
        "i64": (torch.int64,),
        "bool": (torch.bool, torch.uint8),
        "bits": (torch.uint8,),
    }
    shape = tuple(dim if dim == "kv" else sizes[dim] for dim in param.dims)
    check.need(label, tensor, kinds[param.dtype], shape, device)
    if "kv" in param.dims:
        have = tensor.shape[param.dims.index("kv")]
        need = -(-kv // 8) if param.dtype == "bits" else kv
        if have < need:
            what = f"{need} bytes of eight positions" if param.dtype == "bits" else f"{need} positions"
            raise ArgumentError(
                f"{label}: shape {tuple(tensor.shape)}, but this call reads {what}; give more"
            )


def is_static(params: Any) -> bool:
    """Whether parameters are such as a model holds and passes again and again: one value a head, in plain
    tensors."""
    import torch

    plain = (torch.Tensor, torch.nn.Parameter)
    return isinstance(params, Mapping) and all(
        type(t) in plain
        and t.layout is torch.strided
        and t.ndim == 1
        and not t.is_neg()
        and not (t.requires_grad and torch.is_grad_enabled())
        for t in params.values()
    )


def static_key(params: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells two sets of static parameters apart: of each its name, first byte and end, and the rest,
    the size of its storage as well, which somebody may have cut short."""
    return tuple(
        (
            *(name, at := t.data_ptr(), at + t.nbytes),
            *(t.dtype, t.shape, t.stride(), t.device, t.untyped_storage().nbytes()),
        )
        for name, t in params.items()
    )
