"""[cache.k] and [cache.v]: their keys -> QuantSpec, or every mistake in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvgen.errors import ABSENT
from kvgen.ir import LayoutSpec, QuantSpec
from kvgen.ir.codec import CODECS, TABLE, Codec, table_bits
from kvgen.ir.quant import D_BLOCK_STEP, GROUPS
from kvgen.passes.fields import GROUP_KEYS, quant_fields
from kvgen.passes.reading import MISSING, Problems, note, note_unknown, read_table, working

SEGMENT_STEP = 16
"""Elements of a segment are a multiple of this."""


@dataclass(frozen=True)
class Around:
    """What the rules of one side need to know beside its own table."""

    side: str
    width: Any
    """Elements of a row, or MISSING."""
    page_size: Any
    """Tokens of a page, or MISSING."""


def read_quant(table: Any, around: Around, problems: Problems) -> QuantSpec | None:
    """The storage of one side without its layout; None where a mistake was noted."""
    path, before = f"cache.{around.side}", len(problems)
    if isinstance(table, Mapping) and "segments" in table:
        found = _segments(table, path, around, problems)
    else:
        found = _one(table, path, around, problems)
    return found if len(problems) == before else None


def _one(table: Any, path: str, around: Around, problems: Problems) -> QuantSpec | None:
    if isinstance(table, Mapping):
        table = _spelled_out(table)
    q = read_table(quant_fields(), table, path, problems)
    if any(value is MISSING for value in q.values()):
        return None
    fmt = CODECS[q["format"]]
    if not _check_levels(fmt, q, path, problems):
        return None
    if fmt.name == TABLE:
        fmt = replace(fmt, bits=table_bits(len(q["levels"])))
    if not fmt.scaled:
        keys = {"group": None, "scale_dtype": "f32", "affine": False, "outer": None, "scales": "page"}
        for key, off in (keys | {"transform": None, "mean": False}).items():
            if q[key] != off:
                note(
                    problems,
                    f"{path}.{key}",
                    q[key],
                    f"{fmt.name} stores values, not scaled codes",
                    _without(key),
                )
        return QuantSpec(fmt.name)
    group = _group(q["group"], fmt, path, around, problems)
    if group is None:
        return None
    outer = _outer(q["outer"], path, problems)
    found = QuantSpec(
        fmt.name,
        group,
        q["scale_dtype"],
        affine=q["affine"],
        outer=outer,
        scales=q["scales"],
        transform=q["transform"],
        mean=q["mean"],
        levels=tuple(map(float, q["levels"] or ())),
        measure=q["measure"] or "amax",
    )
    _check_scales(found, path, problems)
    _check_transform(found, path, around, problems)
    return found


def _spelled_out(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """A table whose format stands for a combination, with the keys that it means; its own keys come first."""
    name = table.get("format")
    codec = CODECS.get(name) if isinstance(name, str) else None
    if codec is None or not codec.keys:
        return table
    return {**codec.keys, **table, "format": codec.keys["format"]}


def _segments(table: Mapping[str, Any], path: str, around: Around, problems: Problems) -> QuantSpec | None:
    """Runs of d with storage of their own."""
    parts = table["segments"]
    hint = 'for example [{ size = 512, format = "e4m3" }, { size = 64, format = "bf16" }]'
    if (
        not isinstance(parts, list)
        or not 2 <= len(parts) <= 8
        or not all(isinstance(p, Mapping) for p in parts)
    ):
        note(problems, f"{path}.segments", parts, "not a list of 2 to 8 tables", hint)
        return None
    rest = {key: value for key, value in table.items() if key not in ("segments", "scales", "layout")}
    for key, value in rest.items():
        note(problems, f"{path}.{key}", value, "each segment has its own", f"put {key} into the segments")
    found = []
    for number, part in enumerate(parts):
        own = f"{path}.segments[{number}]"
        size = part.get("size")
        if type(size) is not int or size < SEGMENT_STEP or size % SEGMENT_STEP:
            note(problems, f"{own}.size", size, "not a multiple of 16 elements", "for example 64")
            return None
        quant = _one(
            {k: v for k, v in part.items() if k != "size"}, own, replace(around, width=size), problems
        )
        if quant is None:
            return None
        for key, value in (("layout", quant.layout), ("transform", quant.transform), ("mean", quant.mean)):
            if value:
                note(problems, f"{own}.{key}", value, "is for whole rows", _without(key))
        if quant.scales != "page":
            note(problems, f"{own}.scales", quant.scales, "is for whole rows", f"put it into [{path}]")
        if quant.spans:
            reason = "blocks of tokens are for whole rows"
            note(problems, f"{own}.group", dict(quant.group), reason, "tok = 1 works")
        found.append((size, quant))
    total = sum(size for size, _ in found)
    if around.width is not MISSING and total != around.width:
        reason = f"the segments have {total} elements together, but a row has {around.width}"
        note(
            problems, f"{path}.segments", [size for size, _ in found], reason, "sizes must add up to the row"
        )
    scales = table.get("scales", "page")
    places = quant_fields()["scales"]
    if places.check(scales):
        note(problems, f"{path}.scales", scales, "not one of the choices", places.hint)
        return None
    return QuantSpec("f32", segments=tuple(found), scales=scales)


def _check_levels(fmt: Codec, q: dict[str, Any], path: str, problems: Problems) -> bool:
    """Whether levels are given where the codec takes them, and are a codebook."""
    levels = q["levels"]
    if fmt.name != TABLE:
        for key in ("levels", "measure"):
            if q[key] is not None:
                note(
                    problems,
                    f"{path}.{key}",
                    q[key],
                    f"{fmt.name} has its own",
                    f"format = {TABLE!r} takes {key}",
                )
                return False
        return True
    hint = "3 to 16 ascending numbers, for example [-1.0, -0.3, 0.3, 1.0]"
    if levels is None:
        note(
            problems,
            f"{path}.levels",
            ABSENT,
            f"missing: format = {TABLE!r} has ascending levels of your own",
            hint,
        )
        return False
    numbers = isinstance(levels, list) and all(type(x) in (int, float) for x in levels)
    if not numbers or not 3 <= len(levels) <= 16 or not all(map(_rises, levels, levels[1:])):
        note(
            problems, f"{path}.levels", levels, "not 3 to 16 ascending finite numbers of the f32 range", hint
        )
        return False
    return True


def _rises(a: float, b: float) -> bool:
    """Whether b is above a by enough for f32 to tell, and inside its range."""
    # A NaN compares as false, and so does an integer that no float holds, before any arithmetic.
    return abs(a) < 2.0**100 and abs(b) < 2.0**100 and b - a > 2.0**-20 * max(abs(a), abs(b), 2.0**-20)


def _group(
    group: Any, fmt: Codec, path: str, around: Around, problems: Problems
) -> tuple[tuple[str, int], ...] | None:
    if group is None:
        group = {"tok": 1, "head": 1}
    unknown = [key for key in group if isinstance(key, str) and key not in ("tok", "head", "d")]
    for key in unknown:
        note_unknown(problems, f"{path}.group.{key}", key, group, GROUP_KEYS)
    if unknown:
        return None
    # Keys may be anything here, so they are compared as a set: they need not sort.
    dims = next((dims for dims in GROUPS if set(dims) == set(group)), None)
    whole = dims is not None and all(type(n) is int and n >= 1 for dim, n in group.items() if dim != "d")
    if dims is None or not whole or group.get("head", 1) != 1:
        works = (
            "{} (per tensor), {head = 1} (per head), {tok = 1, head = 1} (per token and head), "
            "{tok = 1, head = 1, d = 32} (per 32 elements of those) or "
            "{tok = 32, head = 1, d = 1} (per channel over 32 tokens)"
        )
        note(problems, f"{path}.group", group, f"no {fmt.name} kernel scales by this block", works)
        return None
    tokens, size = group.get("tok", 1), around.page_size
    if size is not MISSING and size % tokens:
        fits = [n for n in range(2, size + 1) if size % n == 0]
        reason = f"does not divide page_size = {size}: a block of tokens lies in one page"
        note(problems, f"{path}.group.tok", tokens, reason, working(1, *fits), works=(1, *fits))
        return None
    if "d" in dims and not _check_d_block(group["d"], tokens, fmt, path, around.width, problems):
        return None
    return tuple((dim, group[dim]) for dim in dims)


def _check_d_block(block: Any, tokens: int, fmt: Codec, path: str, width: Any, problems: Problems) -> bool:
    """Whether blocks of ``block`` elements of d can share a scale: they tile a row and its packed parts."""
    if width is MISSING:
        return False
    if type(block) is int and block == 1 and tokens > 1:
        return True
    part = width // fmt.packed
    fits = [
        b
        for b in range(D_BLOCK_STEP, width, D_BLOCK_STEP)
        if width % b == 0 and (part % b == 0 or b % part == 0)
    ]
    if type(block) is int and block in fits:
        return True
    reason = f"not a multiple of {D_BLOCK_STEP} below head_dim = {width} that divides it"
    if fmt.packed > 1:
        reason += f", nor one that packed parts of {part} hold whole, or that holds them whole"
    if tokens > 1:
        reason += ", nor 1"
    hint = working(*fits) if fits else "leave d out: this row is too short for blocks"
    note(problems, f"{path}.group.d", block, reason, hint, works=tuple(fits))
    return False


def _outer(outer: Any, path: str, problems: Problems) -> tuple[str, ...] | None:
    if outer is None:
        return None
    if outer in ({}, {"head": 1}):
        return tuple(outer)
    reason = "an outer scale is one number, or one per head"
    note(problems, f"{path}.outer", outer, reason, "{} or {head = 1}")
    return None


def _check_scales(q: QuantSpec, path: str, problems: Problems) -> None:
    """Refuse scales that the codec, the group or the place cannot have."""
    if q.affine and not q.fmt.integer:
        integers = ", ".join(c.name for c in CODECS.values() if c.integer)
        reason = f"{q.format} has no integer codes"
        note(problems, f"{path}.affine", True, reason, f"false, or a format of {integers}")
    if q.affine and q.scale_dtype in ("e8m0", "e4m3"):
        reason = "affine codes have a minimum beside the scale, which this type cannot hold"
        note(problems, f"{path}.scale_dtype", q.scale_dtype, reason, "'f32', 'f16' or 'bf16'")
    if q.fmt.measure == "rms" and q.scale_dtype == "e8m0":
        reason = "a power of two stands for a block's largest magnitude, not for its mean square"
        note(problems, f"{path}.scale_dtype", "e8m0", reason, "'f32', 'f16', 'bf16' or 'e4m3'")
    if q.outer is not None and (q.affine or q.static_scale):
        reason = "an outer scale multiplies scales that an append finds, without a minimum"
        note(problems, f"{path}.outer", dict.fromkeys(q.outer, 1), reason, "leave outer out")
    if not q.static_scale:
        if q.scales == "inline" and q.tok_block > 1:
            reason = f"{q.tok_block} tokens share a scale, which cannot lie behind each one's row"
            note(problems, f"{path}.scales", "inline", reason, "'page' or 'pool'")
        return
    if q.affine:
        note(problems, f"{path}.affine", True, "a minimum cannot be given: put tok into the group", "false")
    if q.scale_dtype != "f32":
        note(problems, f"{path}.scale_dtype", q.scale_dtype, "scales that are given are f32", "'f32'")
    if q.scales != "page":
        note(
            problems,
            f"{path}.scales",
            q.scales,
            "scales that are given lie outside the pages",
            _without("scales"),
        )
    if q.fmt.measure == "rms":
        note(problems, f"{path}.group", dict(q.group), "its unit is each row's: put tok into the group", "")


def _check_transform(q: QuantSpec, path: str, around: Around, problems: Problems) -> None:
    width = around.width
    if q.transform and width is not MISSING and width & (width - 1):
        near = 1 << width.bit_length() - 1
        reason = f"needs rows of a power of two elements, not {width}"
        note(problems, f"{path}.transform", q.transform, reason, f"leave it out, or {near} elements")
    if q.mean and around.side != "k":
        note(problems, f"{path}.mean", True, "only K has a mean subtracted", _without("mean"))


def _without(key: str) -> str:
    return f"leave {key} out"


def with_layout(quant: QuantSpec | None, layout: LayoutSpec | None) -> QuantSpec | None:
    """``quant`` with inner axes of its own."""
    return quant if quant is None else replace(quant, layout=layout)
