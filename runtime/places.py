"""places: where the bytes of tensors lie, and which tensors must not share any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvgen.errors import ArgumentError, brief


def need_tensor(name: str, value: Any) -> None:
    """Refuse what is no tensor with a shape and strides; it may still lack memory."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise ArgumentError(f"{name} = {brief(value)}: give a torch tensor")
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise ArgumentError(f"{name}: a tensor of layout {kind}; give a plain, dense tensor")
    # Fake tensors, distributed ones and the like: their bytes are elsewhere, if anywhere.
    if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or torch._is_functional_tensor(
        value
    ):
        raise ArgumentError(f"{name}: a {type(value).__name__} that stands for another; give a plain tensor")


def need_memory(name: str, tensor: Any) -> None:
    """Refuse a tensor whose elements do not all lie in memory, each on a multiple of its size."""
    try:
        address, held = tensor.data_ptr(), tensor.untyped_storage().nbytes()
        nowhere = tensor.numel() > 0 and (
            address == 0 or tensor.storage_offset() * tensor.itemsize + reach(tensor) > held
        )
    except RuntimeError:  # a tensor of a functorch transform, a fake one
        address, nowhere = 0, True
    if nowhere:
        raise ArgumentError(f"{name}: a {type(tensor).__name__} without memory; give a plain, dense tensor")
    if address % tensor.itemsize:
        raise ArgumentError(
            f"{name}: starts at an address that is no multiple of {tensor.itemsize} bytes; use .clone()"
        )


def need_apart(outputs: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Refuse outputs that overlap themselves (``.expand``), each other, or what a kernel reads."""
    taken = dict(others)
    for name, tensor in outputs.items():
        end = 1
        axes = [] if tensor.is_contiguous() else zip(tensor.stride(), tensor.shape, strict=True)
        for stride, size in sorted(axes):
            if size > 1 and stride < end:
                raise ArgumentError(
                    f"{name}: strides {tensor.stride()} put several elements into one place; "
                    "give memory of its own for each"
                )
            end += max(0, size - 1) * stride
        need_outside({name: tensor}, taken)
        taken[name] = tensor


def need_outside(tensors: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Refuse tensors that share an element's bytes with one of ``others``."""
    for name, tensor in tensors.items():
        for other, used in others.items():
            if _overlap(tensor, used):
                raise ArgumentError(f"{name}: shares memory with {other}; give {name} memory of its own")


def is_row(tensor: Any, pool: Any) -> bool:
    """Whether ``tensor`` is one of ``pool[0]``, ``pool[1]``, ..."""
    if tuple(tensor.shape) != tuple(pool.shape[1:]) or tensor.stride() != pool.stride()[1:]:
        return False
    away, step = tensor.data_ptr() - pool.data_ptr(), pool.stride(0) * pool.itemsize
    row, rest = divmod(away, step) if step else (0, away)
    return rest == 0 and 0 <= row < int(pool.shape[0])


def reach(tensor: Any) -> int:
    """Bytes from the first element of a tensor to past its last; 0 where there is none."""
    if tensor is None or not tensor.numel():
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int((last + 1) * tensor.itemsize)


def spans(tensors: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """Address ranges that hold all elements, joined where they meet or overlap."""
    found: list[tuple[int, int]] = []
    for first, end in sorted((t.data_ptr(), t.data_ptr() + reach(t)) for t in tensors.values()):
        if found and first <= found[-1][1] + 4096:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((first, end))
    return tuple(found)


def array(tensor: Any) -> Any:
    """A CPU tensor's bytes as a numpy array of its strides (numpy has no bfloat16).

    Torch lets no one resize the memory of a tensor that numpy has seen.
    """
    import torch

    same = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    return tensor.detach().view(same).numpy()


def _overlap(one: Any, two: Any) -> bool:
    """Whether two tensors share an element's bytes; False where that takes too long to find out."""
    first, second = one.data_ptr(), two.data_ptr()
    # Most tensors lie apart, and of those that do only the lower one's extent matters.
    if first + reach(one) <= second if first < second else second + reach(two) <= first:
        return False
    if not one.numel() or not two.numel():
        return False
    if one.device.type != "cpu" or two.device.type != "cpu":
        return True
    try:
        share: Any = np.shares_memory  # numpy's stub knows two values of max_work only
        return bool(share(array(one), array(two), max_work=10_000))
    except np.exceptions.TooHardError:
        return False
