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
) -> tuple[Layer, ...]:
    """Zeroed caches of ``num_pages`` pages for ``layers`` layers; layers of one spec lie in one slab.

    ``library``: one for all layers, or a sequence with the library of each. ``scales``: as for
    ``new_cache``, for every layer. Raises ``ArgumentError``, also for libraries that cannot share pages.
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
        caches = own.new_cache(num_pages, layers=len(places), scales=scales).layers
        made |= {at: Layer(own, cache) for at, cache in zip(places, caches, strict=True)}
    return tuple(made[at] for at in range(layers))


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
