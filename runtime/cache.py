"""Cache: the buffers of a paged KV cache and typed views of its planes.

Built by ``new_cache`` (one aligned slab) or ``runtime.adopt`` (somebody else's buffers). Needs only the page
record, so an exported library uses it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvgen.errors import ArgumentError, brief
from kvgen.ir import PageRecord, Plane, Spec
from kvgen.runtime import places
from kvgen.runtime.given import bind_given

if TYPE_CHECKING:
    import torch

RAW_ROWS = "raw_rows"
"""Name of the tensor that says which raw row each page has."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a storage type's name: bytes (uint8) for packed codes and powers of two."""
    import torch

    return {
        "f32": torch.float32,
        "bf16": torch.bfloat16,
        "f16": torch.float16,
        "int8": torch.int8,
        "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
    }.get(name, torch.uint8)


class Cache:
    """A paged KV cache of one layer.

    Planes are attributes: ``cache.k``, ``cache.v``, ``cache.k_scale``, ``cache.v_scale`` (those that the
    formats have), tensors whose axes stand in the order of the layout string, split axes included. Where the
    spec leaves tokens unquantised, ``cache.k_raw`` and ``cache.v_raw`` (raw rows, head, tok, d) hold them,
    and ``cache.raw_rows`` (num_pages,) int32 says which raw row each page has, -1 for none: the host side's
    to write, in place (see ``runtime.raw``).
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
        # Whether the pages of a call have their raw rows, only the long way looks.
        quick = self.device.type == "cpu" and spec.cache.raw is None
        self.calls = Calls(num_pages, self._fields) if quick else None
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

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ArgumentError(
            "a cache cannot be pickled: it is memory that a library's kernels know. Save the tensors of "
            "cache.planes, and copy them into those of another new_cache() of the same spec"
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
    means: Mapping[str, Any] | None = None,
    raw_rows: int | None = None,
    layers: int = 1,
    device: str = "cpu",
) -> Cache:
    """A zeroed cache of ``num_pages`` pages for each of ``layers`` layers, in one slab for each pool.

    ``scales``: ``{"k": tensor, "v": tensor}`` for formats with static or outer scales, shaped () or
    (kv_heads,); ``means``: ``{"k": (kv_heads, head_dim)}`` where the spec subtracts a mean. A first dimension
    of ``layers`` gives each layer its own.
    ``raw_rows``, where the spec leaves tokens unquantised: how many pages can hold such tokens at a time.
    None has page p use raw row p: they need not be handed out, at the memory of an unquantised cache. With a
    number no page has a row yet: ``runtime.raw.RawRows`` hands them out (an engine does). All layers share
    ``cache.raw_rows``, as they share page ids.
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
    rows = _count_rows(record, num_pages, raw_rows)
    given = bind_given(spec, scales, means, device, layers)
    align = max(64, record.align)
    sizes = {pool: size.at(num_pages) for pool, size in record.pools}
    if record.raw:
        sizes["raw"] = rows * record.raw_bytes()
    steps = {pool: -(-size // align) * align for pool, size in sizes.items()}
    try:
        slabs = {pool: _allocate(step * layers, align, device) for pool, step in steps.items()}
    except (MemoryError, RuntimeError) as error:
        size = sum(steps.values()) * layers
        reason = f"{size} bytes with layers = {layers}, and there is no room ({brief(str(error))})"
        raise ArgumentError(f"num_pages = {num_pages}: {reason}; give fewer pages") from None
    row_ids = _row_ids(num_pages, raw_rows, device) if record.raw else {}
    made = []
    for layer in range(layers):
        pools = {pool: slab[layer * steps[pool] : (layer + 1) * steps[pool]] for pool, slab in slabs.items()}
        planes = {plane.name: _view(plane, pools[plane.pool], num_pages) for plane in record.planes}
        raw = {plane.name: _view(plane, pools[plane.pool], rows) for plane in record.raw}
        made.append(Cache(spec, record, num_pages, planes | given[layer] | raw | row_ids, pools))
    made[0].layers = tuple(made)
    return made[0]


def _count_rows(record: PageRecord, num_pages: int, raw_rows: Any) -> int:
    """Raw rows to allocate: 0 for a spec without."""
    if raw_rows is None:
        return num_pages if record.raw else 0
    shown = f"raw_rows = {brief(raw_rows)}"
    if not record.raw:
        raise ArgumentError(f"{shown}: every token becomes codes at once in this cache; leave raw_rows out")
    if isinstance(raw_rows, bool) or not isinstance(raw_rows, int) or not 1 <= raw_rows <= num_pages:
        raise ArgumentError(f"{shown}: give 1 to {num_pages} (num_pages) raw rows, or None for one a page")
    return raw_rows


def _row_ids(num_pages: int, raw_rows: int | None, device: Any) -> dict[str, torch.Tensor]:
    """The raw row of each page: its own number, or none yet."""
    import torch

    start = torch.arange(num_pages) if raw_rows is None else torch.full((num_pages,), -1)
    return {RAW_ROWS: start.to(device=device, dtype=torch.int32)}


def own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that torch takes for alone in it.

    Planes share no element, but views of one storage would look to ``torch.compile`` as if they did, and it
    refuses to mutate aliases of several types.
    """
    import torch

    # The stride of an axis with one place may be anything, also what numpy has no room for.
    steps = [step if size > 1 else 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    tensor = tensor.detach().as_strided(tensor.shape, steps)
    return torch.from_numpy(places.array(tensor)).view(tensor.dtype)


def _view(plane: Plane, slab: torch.Tensor, num_pages: int) -> torch.Tensor:
    """One plane of a slab."""
    flat = slab.view(torch_dtype(plane.dtype))
    first = flat.storage_offset() + plane.offset.at(num_pages) // plane.itemsize
    view = flat.as_strided(plane.shape(num_pages), plane.strides(num_pages), first)
    return own_storage(view) if view.device.type == "cpu" else view


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
