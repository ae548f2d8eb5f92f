"""How K or V is stored, in words: what ``kvgen show`` prints."""

from __future__ import annotations

from collections.abc import Sequence

from kvgen.ir import CacheSpec, QuantSpec

PLACES = {"page": "", "pool": " in a pool of their own", "inline": " behind each row"}


def storage_text(quant: QuantSpec) -> str:
    """One side of a cache: its codec, scales and transforms, or its segments."""
    layout = f", own layout '{quant.layout}'" if quant.layout else ""
    if quant.segments:
        parts = "; ".join(f"{size} elements {storage_text(own)}" for size, own in quant.segments)
        return f"{parts}{PLACES[quant.scales] and ', scales' + PLACES[quant.scales]}{layout}"
    if not quant.fmt.scaled:
        return f"{quant.format}{layout}"
    before = ["less a given mean"] if quant.mean else []
    before += ["rotated (Hadamard)"] if quant.transform else []
    levels = f" of {len(quant.levels)} levels" if quant.levels else ""
    name = f"{quant.format}{levels}{' from a minimum' if quant.affine else ''}"
    return ", ".join([*before, name, *_scales(quant)]) + layout


def raw_text(cache: CacheSpec) -> str:
    """Which tokens are left unquantised; empty where none are."""
    raw = cache.raw
    if raw is None:
        return ""
    first = [f"the first {raw.keep_first} tokens"] if raw.keep_first else []
    last = [f"the last {raw.keep_last}"] if raw.keep_last else []
    block = [f"blocks of {raw.block} until they are full"] if raw.block > 1 else []
    return f"{_listed([*first, *last, *block])}; raw rows hold a page each"


def _listed(things: Sequence[str]) -> str:
    """``a, b and c``."""
    *front, back = things
    return f"{', '.join(front)} and {back}" if front else back


def _scales(quant: QuantSpec) -> list[str]:
    dims = dict(quant.group)
    words = {
        "d": f"{dims.get('d')} elements of d" if dims.get("d") != 1 else "element of d",
        "tok": f"{quant.tok_block} tokens" if quant.tok_block > 1 else "token",
        "head": "head",
    }
    per = _listed([words[dim] for dim in quant.scale_dims] or ["tensor"])
    kind = f"one {quant.scale_dtype} scale{' and minimum' if quant.affine else ''} per {per}"
    found = [kind + PLACES[quant.scales] + (", given to new_cache" if quant.static_scale else "")]
    if quant.outer is not None:
        found.append(f"times one given scale per {' '.join(quant.outer) or 'tensor'}")
    return found
