"""Cache: the buffers of a paged KV cache and typed views of its planes.

Built by ``new_cache`` (one aligned slab) or ``adopt`` (somebody else's buffers). Needs only the page
record, so an exported library uses it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from kvgen.errors import ArgumentError, brief
from kvgen.ir import PageRecord, Plane, Spec
from kvgen.ir.quant import ZERO_BLOCK_AMAX
from kvgen.runtime import places

if TYPE_CHECKING:
    import torch


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a storage type's name."""
    import torch

    return {
        "f32": torch.float32,
        "bf16": torch.bfloat16,
        "f16": torch.float16,
        "int8": torch.int8,
        "int4x2": torch.uint8,
        "e4m3": torch.float8_e4m3fn,
    }[name]


class Cache:
    """A paged KV cache of one layer.

    Planes are attributes: ``cache.k``, ``cache.v``, ``cache.k_scale``, ``cache.v_scale`` (those that the
    formats have), tensors whose axes stand in the order of the layout string, split axes included.
    """

    def __init__(
        self,
        spec: Spec,
        record: PageRecord,
        num_pages: int,
        planes: Mapping[str, torch.Tensor],
        pools: Any = None,
    ) -> None:
        self.spec = spec
        self.record = record
        self.num_pages = num_pages
        self.planes = dict(planes)
        self.pools: dict[str, torch.Tensor] = pools or {}
        """The slabs, as uint8; empty for an adopted cache."""
        self.layers: tuple[Cache, ...] = (self,)
        """One cache for each layer; all share the page ids."""
        self.device = next(iter(self.planes.values())).device
        from torch.compiler import is_compiling

        from kvgen.runtime.quick import Calls

        self.traced = is_compiling
        """Whether torch.compile is looking, which must see a custom op instead of Python."""
        self.ops: Any = None
        """The library's ops in ``torch.ops``."""
        # Views of the cache's own: what a caller does to the shape of its tensors does not move them.
        self._fields = {name: tensor.detach() for name, tensor in self.planes.items()}
        if self.device.type == "cpu":
            for tensor in self._fields.values():
                places.array(tensor)  # from now on torch refuses to resize the memory
        self.calls = Calls(num_pages, self._fields) if self.device.type == "cpu" else None
        self._arguments: dict[str, Any] = {}
        for name, tensor in self._fields.items():
            self._arguments[name] = tensor
            if record.has(name):
                for placed, stride in zip(record.plane(name).axes, tensor.stride(), strict=True):
                    if not placed.constant:
                        self._arguments[f"{name}_stride_{placed.axis.key}"] = stride

    def __getattr__(self, name: str) -> torch.Tensor:
        planes = self.__dict__.get("planes", {})
        if name in planes:
            return planes[name]  # type: ignore[no-any-return]
        raise AttributeError(f"this cache has no {name!r}; it has {', '.join(planes)}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("planes", ()):
            hint = f"write into it (cache.{name}.copy_(...)), or adopt() other buffers"
            raise AttributeError(f"cache.{name} is where the kernels read and write; {hint}")
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: Any) -> Cache:
        raise ArgumentError(
            "a cache is memory that a library's kernels know: make another with new_cache() and copy the "
            "tensors of cache.planes into it"
        )

    @property
    def capacity(self) -> int:
        """Tokens that all pages hold together."""
        return self.num_pages * self.spec.cache.page_size

    def fields(self) -> dict[str, torch.Tensor]:
        """The planes as the kernels see them, by a name for messages."""
        return {f"the cache's {name}": tensor for name, tensor in self._fields.items()}

    def arguments(self) -> dict[str, Any]:
        """Pointers and run-time strides by ABI name."""
        return self._arguments

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in self.planes.items())
        return f"Cache({self.num_pages} pages of {self.spec.cache.page_size} tokens: {shapes})"


def new_cache(
    spec: Spec,
    record: PageRecord,
    num_pages: int,
    *,
    scales: Mapping[str, Any] | None = None,
    layers: int = 1,
    device: str = "cpu",
) -> Cache:
    """A zeroed cache of ``num_pages`` pages for each of ``layers`` layers, in one slab for each pool.

    ``scales``: ``{"k": tensor, "v": tensor}`` for formats with static scales, shaped () or (kv_heads,).
    Raises ``ArgumentError`` for bad counts and for missing, surplus or non-positive scales.
    """
    for name, value in (("num_pages", num_pages), ("layers", layers)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(f"{name} = {brief(value)}: give a positive integer")
    if num_pages > 2**31 - 1:
        raise ArgumentError(f"num_pages = {brief(num_pages)}: page ids are int32, so at most {2**31 - 1}")
    if record.page_bytes() * num_pages * layers >= 2**62:
        raise ArgumentError(f"layers = {brief(layers)}: more bytes than there are addresses; give fewer")
    _check_device(device)
    static = _static_scales(spec, scales, device)
    align = max(64, record.align)
    steps = {pool: -(-size.at(num_pages) // align) * align for pool, size in record.pools}
    try:
        slabs = {pool: _allocate(step * layers, align, device) for pool, step in steps.items()}
    except (MemoryError, RuntimeError) as error:
        size = sum(steps.values()) * layers
        reason = f"{size} bytes with layers = {layers}, and there is no room ({brief(str(error))})"
        raise ArgumentError(f"num_pages = {num_pages}: {reason}; give fewer pages") from None
    made = []
    for layer in range(layers):
        pools = {pool: slab[layer * steps[pool] : (layer + 1) * steps[pool]] for pool, slab in slabs.items()}
        planes = {plane.name: _view(plane, pools[plane.pool], num_pages) for plane in record.planes}
        made.append(Cache(spec, record, num_pages, planes | static, pools))
    made[0].layers = tuple(made)
    return made[0]


def adopt(spec: Spec, record: PageRecord, *, scales: Mapping[str, Any] | None = None, **planes: Any) -> Cache:
    """A cache over tensors that someone else owns: ``k=``, ``v=`` and the scale planes the spec has.

    Each tensor has the axes of the layout string in order. Strides inside a page must be those of the
    page record; the strides of ``page`` and of axes left of it are free. Raises ``ArgumentError``.
    """
    names = [plane.name for plane in record.planes]
    unknown = sorted(set(planes) - set(names))
    if unknown:
        raise ArgumentError(f"{unknown[0]} = ...: this cache has no such plane; it has {', '.join(names)}")
    missing = [name for name in names if planes.get(name) is None]
    if missing:
        raise ArgumentError(f"{missing[0]}: missing; adopt() needs {', '.join(names)}")
    for plane in record.planes:
        tensor = planes[plane.name]
        places.need_tensor(plane.name, tensor)
        if tensor.dim() != len(plane.axes):
            axes = " ".join(str(placed.axis) for placed in plane.axes)
            raise ArgumentError(f"{plane.name}: shape {tuple(tensor.shape)}, but its axes are '{axes}'")
    pages = {name: planes[name].shape[_page_axis(record.plane(name))] for name in names}
    num_pages = min(pages.values(), default=0)
    for plane in record.planes:
        _check_adopted(plane, planes[plane.name], num_pages, pages)
    device = planes["k"].device
    for name in names:
        if planes[name].device != device:
            raise ArgumentError(f"{name}: on {planes[name].device}, but k is on {device}; move one of them")
    for name in names:
        places.need_memory(name, planes[name])
    if device.type == "cpu":
        places.need_apart({name: planes[name] for name in names}, {})
    static = _static_scales(spec, scales, str(device))
    kept = {name: planes[name] for name in names}
    if device.type == "cpu" and len({t.untyped_storage().data_ptr() for t in kept.values()}) < len(kept):
        kept = {name: _own_storage(tensor) for name, tensor in kept.items()}
    return Cache(spec, record, num_pages, kept | static)


def _own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that torch takes for alone in it.

    Planes share no element, but views of one storage would look to ``torch.compile`` as if they did, and it
    refuses to mutate aliases of several types.
    """
    import torch

    # The stride of an axis with one place may be anything, also what numpy has no room for.
    steps = [step if size > 1 else 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    tensor = tensor.detach().as_strided(tensor.shape, steps)
    return torch.from_numpy(places.array(tensor)).view(tensor.dtype)


def _page_axis(plane: Plane) -> int:
    return [placed.axis.dim for placed in plane.axes].index("page")


def _check_adopted(plane: Plane, tensor: Any, num_pages: int, pages: Mapping[str, int]) -> None:
    axes = " ".join(str(placed.axis) for placed in plane.axes)
    if tensor.dtype != torch_dtype(plane.dtype):
        raise ArgumentError(f"{plane.name}: dtype {tensor.dtype}, but the spec stores {plane.dtype}")
    want = plane.shape(pages.get(plane.name, 0))
    if tuple(tensor.shape) != want:
        raise ArgumentError(f"{plane.name}: shape {tuple(tensor.shape)}, but axes '{axes}' need {want}")
    if pages[plane.name] != num_pages:
        raise ArgumentError(f"{plane.name}: {pages[plane.name]} pages, but another plane has {num_pages}")
    if num_pages < 1:
        raise ArgumentError(f"{plane.name}: no pages; give at least one")
    if tensor.is_neg():
        raise ArgumentError(f"{plane.name}: a lazily negated view, whose memory differs; use .resolve_neg()")
    inside = 1
    for placed, stride, extent in reversed(list(zip(plane.axes, tensor.stride(), tensor.shape, strict=True))):
        step = placed.stride.fixed // plane.itemsize
        if placed.constant and extent > 1 and stride != step:
            reason = (
                f"stride {stride} of axis {placed.axis}, but the layout puts {step} elements between steps"
            )
            raise ArgumentError(
                f"{plane.name}: {reason}; lay the buffer out so, or change cache.layout or align"
            )
        if not placed.constant and extent > 1 and stride < 1:
            raise ArgumentError(f"{plane.name}: stride {stride} of axis {placed.axis}; steps must go forward")
        inside += (extent - 1) * stride
    outer = [
        (s, e) for p, s, e in zip(plane.axes, tensor.stride(), tensor.shape, strict=True) if not p.constant
    ]
    reach = plane.span() // plane.itemsize
    for stride, extent in sorted(outer):
        if extent > 1 and stride < reach:
            raise ArgumentError(
                f"{plane.name}: stride {stride} is below the {reach} elements it steps over: overlap"
            )
        reach += (extent - 1) * stride


def _view(plane: Plane, slab: torch.Tensor, num_pages: int) -> torch.Tensor:
    """One plane of a slab."""
    flat = slab.view(torch_dtype(plane.dtype))
    first = flat.storage_offset() + plane.offset.at(num_pages) // plane.itemsize
    view = flat.as_strided(plane.shape(num_pages), plane.strides(num_pages), first)
    return _own_storage(view) if view.device.type == "cpu" else view


def _allocate(nbytes: int, align: int, device: str) -> torch.Tensor:
    import torch

    from kvgen.backends.cpu import memory

    if str(device) == "cpu":
        return memory.allocate_tensor(nbytes, align)
    # CUDA's and HIP's allocators start blocks on 512 bytes; a larger align needs room to shift.
    slab = torch.zeros(nbytes + align, dtype=torch.uint8, device=device)
    shift = -slab.data_ptr() % align
    return slab[shift : shift + nbytes]


def _check_device(device: Any) -> None:
    import torch

    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError, TypeError, ValueError, OverflowError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise ArgumentError(f"device = {brief(device)}: torch cannot use it here ({reason})") from None


def _static_scales(spec: Spec, scales: Mapping[str, Any] | None, device: str) -> dict[str, torch.Tensor]:
    import torch

    scales = {} if scales is None else scales
    if not isinstance(scales, Mapping):
        raise ArgumentError(f"scales = {brief(scales)}: give a mapping, {{'k': tensor, 'v': tensor}}")
    unknown = [key for key in scales if not isinstance(key, str) or key not in spec.cache.fields]
    if unknown:
        raise ArgumentError(
            f"scales[{brief(unknown[0])}]: give scales for {' and '.join(map(repr, spec.cache.fields))}"
        )
    found = {}
    for side in spec.cache.fields:
        quant = spec.cache.quant(side)
        if not quant.static_scale:
            if scales.get(side) is not None:
                raise ArgumentError(
                    f"scales[{side!r}]: {quant.format} here has no static scales; leave them out"
                )
            continue
        count = spec.attention.kv_heads if "head" in quant.scale_dims else 1
        if scales.get(side) is None:
            what = f"{count} positive f32 scales, one a KV head" if count > 1 else "one positive f32 scale"
            reason = "cannot be computed by an append (its group spans tokens)"
            raise ArgumentError(f"scales[{side!r}]: missing; the scale of {side} {reason}: give {what}")
        tensor = _numbers(f"scales[{side!r}]", scales[side], count, device)
        # Below that, 1 / scale is no number to round with.
        if not bool((torch.isfinite(tensor) & (tensor >= ZERO_BLOCK_AMAX)).all()):
            shown = brief(tensor.tolist())
            raise ArgumentError(
                f"scales[{side!r}] = {shown}: every scale must be finite and at least 2**-100"
            )
        found[f"{side}_scale"] = tensor
    return found


def _numbers(name: str, value: Any, count: int, device: Any) -> torch.Tensor:
    """``count`` numbers, in a list, an array or a tensor, as a flat f32 tensor on ``device``."""
    import torch

    if isinstance(value, torch.Tensor):
        places.need_tensor(name, value)
        places.need_memory(name, value)
        value = value.detach()
    else:
        flat = list(value) if isinstance(value, list | tuple) else [value]
        if not isinstance(value, np.ndarray) and not all(isinstance(x, Real) for x in flat):
            raise ArgumentError(f"{name} = {brief(value)}: give numbers, or a tensor of them")
    size = value.numel() if isinstance(value, torch.Tensor) else np.size(value)
    if size != count:  # before any copy: an expanded tensor may be of any size
        raise ArgumentError(f"{name}: {size} values, but the spec has {count}")
    try:
        return torch.as_tensor(value, dtype=torch.float32, device=device).reshape(-1).contiguous()
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ArgumentError(f"{name} = {brief(value)}: give numbers, or a tensor of them") from None
