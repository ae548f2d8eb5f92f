"""Layer: one layer of a model, its kernels and its cache; all layers share page ids.

Layers whose attention differs (a window on every other one, say) have libraries of their own, each for its
spec. A page of a request is the same page in every layer, so one page table stands for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvgen.errors import ArgumentError, brief
from kvgen.runtime.base import Tensor
from kvgen.runtime.cache import Cache
from kvgen.runtime.ops import CacheOps


@dataclass(frozen=True)
class Layer:
    """Where one layer's keys and values lie, and what reads and writes them."""

    library: CacheOps
    cache: Cache


def new_layers(
    library: CacheOps | Sequence[CacheOps],
    num_pages: int,
    *,
    layers: int,
    scales: Mapping[str, Tensor] | None = None,
    means: Mapping[str, Tensor] | None = None,
    raw_rows: int | None = None,
) -> tuple[Layer, ...]:
    """Zeroed caches of ``num_pages`` pages for ``layers`` layers; layers of one spec lie in one slab.

    ``library``: one for all layers, or a sequence with the library of each. ``scales`` and ``means``: as for
    ``new_cache``, for every layer, or with a first dimension of layers; ``raw_rows``: for those that leave
    tokens unquantised. Raises ``ArgumentError``, also for libraries that cannot share pages.
    """
    each = list(library) if isinstance(library, Sequence) else [library] * layers
    if len(each) != layers:
        raise ArgumentError(
            f"library: {len(each)} of them for {layers} layers; give one for each layer, or one for all"
        )
    _check_alike(each)
    by_spec: dict[str, list[int]] = {}
    for at, own in enumerate(each):
        by_spec.setdefault(own.spec.hash, []).append(at)
    made: dict[int, Layer] = {}
    for places in by_spec.values():
        own = each[places[0]]
        options: dict[str, Any] = {"raw_rows": raw_rows} if own.spec.cache.raw is not None else {}
        given = {
            name: _of_layers(values, places, layers)
            for name, values in (("scales", scales), ("means", means))
        }
        caches = own.new_cache(num_pages, layers=len(places), **given, **options).layers
        made |= {at: Layer(own, cache) for at, cache in zip(places, caches, strict=True)}
    return tuple(made[at] for at in range(layers))


def _of_layers(given: Any, places: list[int], layers: int) -> Any:
    """Of tensors that have a first dimension of layers, those of ``places``."""
    if len(places) == layers or not isinstance(given, Mapping):
        return given
    return {
        name: value[places] if hasattr(value, "ndim") and value.ndim > 1 and len(value) == layers else value
        for name, value in given.items()
    }


def _check_alike(libraries: Sequence[Any]) -> None:
    """Pages of all layers must hold the same tokens, on the same device."""
    for at, library in enumerate(libraries):
        if not isinstance(library, CacheOps):
            hint = "give what kvgen.build or kvgen.runtime.load returned"
            raise ArgumentError(f"library = {brief(library)}: not a library; {hint}")
        for name, own, first in (
            ("page_size", library.spec.cache.page_size, libraries[0].spec.cache.page_size),
            ("device", library.device, libraries[0].device),
        ):
            if own != first:
                raise ArgumentError(
                    f"library[{at}]: {name} {own}, but the first layer's is {first}; all layers share pages"
                )
