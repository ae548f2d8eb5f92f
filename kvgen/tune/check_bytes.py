"""The checks of append, copy and gather: their bytes are defined, so every byte is compared.

Each check yields (case, wrong bytes, message); the message is empty where only bytes differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from kvgen import reference
from kvgen.ir import QuantSpec, Spec
from kvgen.library import Library
from kvgen.reference.codec import NUMPY, Array
from kvgen.runtime.cache import torch_dtype
from kvgen.tune import check_raw
from kvgen.tune import scene as scenes
from kvgen.tune.call_params import angles, as_tensors
from kvgen.tune.check_cases import PROGRAMS
from kvgen.tune.given import given_means, given_scales
from kvgen.tune.raw_rows import raw_pool

FILL = 0xA5
"""Byte of a cache before an append: no type reads it as NaN, so any change shows."""

READ = {"f32": 4e-6, "f16": 1e-3, "bf16": 8e-3}
"""Error over the largest value of a row that gather may make, by the type it returns, where a value is more
than a code times a scale: sums round (those of a rotation log2 d times, and a mean may cancel most of a row),
and may round to the neighbour in a 16-bit type."""

Found = Iterator[tuple[str, int, str]]


def append(library: Library, variant: str, seed: int) -> Found:
    """Rows of every kind into permuted slots, some skipped, few and many; or by requests (``check_raw``)."""
    if library.spec.cache.raw is not None:
        for name, cache, pools, pages in check_raw.append(library, variant, seed, _hard_rows, FILL):
            yield _same(library, name, cache, pools, pages)
        return
    spec, size, rng = library.spec, library.spec.cache.page_size, np.random.default_rng(seed)
    att = spec.attention
    many = max(24, 1100 // att.kv_heads)  # above the row counts from which threads share the work
    if library.target.interpreted:
        rows = library.kernel("append", variant).plan.schedule.int("rows")
        many = min(many, max(1, PROGRAMS * rows // att.kv_heads))
    scales, means = given_scales(spec), given_means(spec)
    for tokens in (1, 3, many):
        pages = -(-tokens // size) + 3
        slots = rng.permutation(pages * size)[:tokens].astype(np.int64)
        if tokens > 2:
            # The last slot of the pool and the first, whatever the permutation says; and a skipped one.
            ends = [pages * size - 1, 0]
            slots = np.concatenate([ends, slots[~np.isin(slots, ends)]])[:tokens].astype(np.int64)
            slots[rng.permutation(len(slots))[: len(slots) // 5 + 1]] = -1
        k, v = (
            _hard_rows(rng, (len(slots), att.kv_heads, width), variant)
            for width in (att.head_dim, att.v_head_dim)
        )
        pools = reference.new_pools(library.record, pages, FILL)
        cache = scenes.cache_from(library, pools, pages, scales, means)
        device = cache.device
        values = None if spec.cache.alias else scenes.padded(v, variant, device)
        given: list[Any] = [scenes.padded(k, variant, device), values, scenes.to_torch(slots, "i64", device)]
        options: dict[str, Any] = scenes.known(scales, means, None)
        if att.rope and att.rope.stored == "post":
            place = rng.integers(0, 500, len(slots)).astype(np.int32)
            place[slots < 0] = 2**31 - 1  # of a token that is skipped, no row of the table is read
            params = {"rope_table": angles(spec, 500)}
            options |= {"positions_T": place, "params": params}
            given.append(scenes.to_torch(place, "i32", device))
            library.append(cache, *given, params=as_tensors(params, device))
        else:
            library.append(cache, *given)
        x = None if spec.cache.alias else v
        reference.append(spec, library.record, pools, pages, k, x, slots, **options)
        yield _same(library, f"append of {tokens} {variant} tokens", cache, pools, pages)


def copy(library: Library, variant: str, seed: int) -> Found:
    """Pages of random bytes, one of them forked twice, all around untouched."""
    rng = np.random.default_rng(seed)
    for pairs in (1, 5):
        pages = 4 * pairs + 3
        order = rng.permutation(pages)
        src, dst = order[:pairs].copy(), order[pairs : 2 * pairs]
        src[-1] = src[0]
        held = pages if library.spec.cache.raw is not None else 0
        pools = reference.new_pools(library.record, pages) | raw_pool(library.record, held)
        for data in pools.values():
            data[:] = rng.integers(0, 256, data.shape, np.uint8)
        # Of the pairs every second has no raw row to copy from, and every fourth none to copy to either.
        raw_rows = rng.permutation(pages).astype(np.int32) if held else None
        if raw_rows is not None:
            raw_rows[src[1::2]] = -1
            raw_rows[dst[1::4]] = -1
        given = (given_scales(library.spec), given_means(library.spec), raw_rows)
        cache = scenes.cache_from(library, pools, pages, *given)
        library.copy(
            cache, *(scenes.to_torch(ids.astype(np.int32), "i32", cache.device) for ids in (src, dst))
        )
        reference.copy(library.record, pools, pages, src, dst)
        if raw_rows is not None:
            both = (raw_rows[src] >= 0) & (raw_rows[dst] >= 0)
            for plane in library.record.raw:
                rows = reference.view(pools, library.record, plane.name, held)
                rows[raw_rows[dst[both]]] = rows[raw_rows[src[both]]]
        yield _same(library, f"copy of {pairs} pages", cache, pools, pages, strict=True)


def gather(library: Library, variant: str, seed: int) -> Found:
    """Ragged requests over permuted pages; values are decoded in f32 and rounded once to the output type."""
    att, size = library.spec.attention, library.spec.cache.page_size
    lens = [0, 1, size - 1, size, size + 1, 3 * size + size // 2]
    if not library.target.interpreted:
        lens.append(300)
    lists = [lens] if not library.target.interpreted else [lens[:3], lens[3:5], lens[5:]]
    for kv_lens in lists:
        name = f"gather of {kv_lens} tokens to {variant}"
        scene = scenes.Scene(library, [0] * len(kv_lens), kv_lens, seed=seed)
        cache = scene.cache()
        total = sum(kv_lens)
        lengths = scenes.to_torch(np.array(kv_lens, np.int32), "i32", cache.device)
        if library.spec.cache.alias:  # one tensor for both, which cannot be given
            dtype = torch_dtype(variant)
            k, _ = library.gather(cache, scene.table(cache.device), lengths, dtype=dtype)
            stored = np.concatenate([w.astype(np.float32) for w in scene.keys_and_values()[0]])
            expected = reference.store_float(stored, variant)
            yield name, _unlike(library.spec, "k", scenes.from_torch(k, variant), expected, variant), ""
            continue
        outs = [
            scenes.Guarded((total, att.kv_heads, width), variant, cache.device)
            for width in (att.head_dim, att.v_head_dim)
        ]
        library.gather(cache, scene.table(cache.device), lengths, out=(outs[0].tensor, outs[1].tensor))
        wrong, message = 0, ""
        for side, out, want in zip("kv", outs, scene.keys_and_values(), strict=True):
            found, intact = out.read()
            rows = np.concatenate([w.astype(np.float32) for w in want]) if want else found
            wrong += _unlike(library.spec, side, found, reference.store_float(rows, variant), variant)
            message = message or ("" if intact else "it wrote outside its outputs")
        for pool, data in scenes.bytes_of(cache).items():
            if (data[: len(scene.pools[pool])] != scene.pools[pool]).any():
                message = message or "it changed bytes of the cache"
        yield name, wrong, message


Check = Callable[[Library, str, int], Found]

CHECKS: Mapping[str, Check] = {"append": append, "copy": copy, "gather": gather}
"""The check of each op whose bytes are defined."""


def _hard_rows(rng: np.random.Generator, shape: tuple[int, int, int], dtype: str) -> Array:
    """Random rows among which stand those that codecs get wrong, in ``dtype`` (bf16 as bits)."""
    rows = rng.standard_normal(shape).astype(np.float32) * 3
    flat = rows.reshape(-1, shape[2])
    if len(flat) > 4:
        kinds = rng.permutation(len(flat))
        flat[kinds[0]] = 0.0
        flat[kinds[1], shape[2] // 2] = 1e4  # everything else in the row becomes small
        flat[kinds[2]] = np.arange(shape[2]) % 255 - 127.0  # amax 127: every x * inv is a whole number
        flat[kinds[2], 0] = 127.0
        flat[kinds[3]] = 2.0**-130  # a denormal: below the smallest block that is not zero
    if len(flat) > 12:
        flat[kinds[4]] = (np.arange(shape[2]) % 253 - 126) + 0.5  # ties
        flat[kinds[4], 0] = 127.0
        flat[kinds[5], 1], flat[kinds[6], -1], flat[kinds[7], 2] = np.nan, np.inf, -np.inf
        flat[kinds[8]] = 65520.0  # rounds to inf in f16
    return reference.store_float(rows, dtype)


def _same(
    library: Library, name: str, cache: Any, pools: dict[str, Array], pages: int, *, strict: bool = False
) -> tuple[str, int, str]:
    """Compare all bytes of a cache with the oracle's; two NaN count as equal unless ``strict``."""
    found = {pool: data[: len(pools[pool])] for pool, data in scenes.bytes_of(cache).items()}
    if not strict:
        for plane in library.record.planes + library.record.raw:
            if plane.dtype not in ("f32", "bf16", "f16"):
                continue
            ours, theirs = (reference.view(p, library.record, plane.name, pages) for p in (found, pools))
            both = _is_nan(ours) & _is_nan(theirs)
            ours[both] = theirs[both]
    return name, _differing(found, pools), ""


def exactly_read(quant: QuantSpec) -> bool:
    """Whether a value is one product, rounded once: the same bits on every machine."""
    parts = [own for _, own in quant.segments] or [quant]
    sums = any(part.affine or part.outer is not None for part in parts)
    return not (sums or quant.transform or quant.mean)


def _unlike(spec: Spec, side: str, found: Array, want: Array, dtype: str) -> int:
    """Elements [T, H, D] that are wrong: by a bit, or by more than ``READ`` where no bits are promised."""
    if exactly_read(spec.cache.quant(side)):
        return _differing({"x": found}, {"x": want})
    ours, theirs = reference.widen(found), reference.widen(want)
    size = np.abs(theirs).max(axis=-1, initial=0.0, keepdims=True)
    return int((~(np.abs(ours - theirs) <= READ[dtype] * size)).sum())


def _differing(found: Mapping[str, Array], want: Mapping[str, Array]) -> int:
    count = 0
    for name, expected in want.items():
        ours = found[name]
        if ours.dtype != np.uint8:
            both = _is_nan(ours) & _is_nan(expected)
            ours = np.where(both, expected, ours)
        count += int((ours.view(np.uint8) != np.ascontiguousarray(expected).view(np.uint8)).sum())
    return count


def _is_nan(array: Array) -> Array:
    if array.dtype == NUMPY["bf16"]:
        return np.asarray((array & 0x7FFF) > 0x7F80)
    return np.isnan(array)
