"""validate: a raw mapping (a TOML file, a dict) -> Spec, or every mistake at once.

Field rules live in ``passes.fields``; this file checks what only several fields together show.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvgen.errors import Diagnostic, SpecError
from kvgen.ir import AttentionSpec, CacheSpec, LayoutError, LayoutSpec, QuantSpec, Spec
from kvgen.ir.cache import PRESETS
from kvgen.ir.layout import Axis
from kvgen.ir.quant import D_BLOCK_STEP, FORMATS, GROUPS, Format
from kvgen.passes.check_attention import check_alias, is_alias, read_options, read_params, read_rope
from kvgen.passes.fields import CACHE, MISSING, QUANT, TOP, Problems, nearest, note, read_table
from kvgen.variants import attention_fields

MOST_BYTES = 1 << 16
"""Of a spec file. One has some hundred; what has many more is something else, a device for example."""


def load_spec(source: str | Path | Mapping[str, Any]) -> Spec:
    """Read a spec from a TOML path or a mapping.

    Raises ``SpecError`` holding all diagnostics, each with path, value, reason and what works.
    """
    if not isinstance(source, str | Path):
        return validate(source)
    path = Path(source)
    try:
        with path.open("rb") as stream:
            data = stream.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise _unreadable(source, f"has more than {MOST_BYTES} bytes", "give the path of a TOML spec")
        raw = tomllib.loads(data.decode("utf-8"))
    except SpecError:
        raise
    except FileNotFoundError:
        raise _unreadable(source, "no such file", "give the path of a TOML spec") from None
    except IsADirectoryError:
        raise _unreadable(source, "is a folder", "give a TOML file in it") from None
    except OSError as error:
        raise _unreadable(
            source, f"cannot be read: {error.strerror}", "give the path of a TOML spec"
        ) from None
    except (ValueError, RecursionError) as error:  # no UTF-8, no TOML, an endless number, endless nesting
        raise _unreadable(source, f"not TOML: {error}", "see examples/") from None
    return validate({"name": re.sub(r"[^\w.+-]", "_", path.stem)[:100], **raw})


def validate(raw: Any) -> Spec:
    """A mapping with ``attention`` and ``cache`` tables -> Spec; ``SpecError`` with every mistake."""
    problems: Problems = []
    top = read_table(TOP, raw, "", problems)
    if not isinstance(raw, Mapping):
        raise SpecError(problems)
    att = read_table(attention_fields(), top["attention"], "attention", problems)
    cache = read_table(CACHE, top["cache"], "cache", problems)
    alias = is_alias(cache["v"])
    quants = {"k": read_table(QUANT, cache["k"], "cache.k", problems)}
    quants["v"] = quants["k"] if alias else read_table(QUANT, cache["v"], "cache.v", problems)
    _check_heads(att, problems)
    preset = cache["layout"] if cache["layout"] in PRESETS else None
    layout = _layout(PRESETS[preset] if preset else cache["layout"], "cache.layout", problems)
    own_sides = ("k",) if alias else ("k", "v")
    for side in own_sides:
        q = quants[side]
        if preset and q["layout"] not in (None, MISSING):
            reason = f"cache.layout = {preset!r} chooses the axes of both sides by itself"
            note(problems, f"cache.{side}.layout", q["layout"], reason, "leave one of the two out")
    own = {side: _layout(quants[side]["layout"], f"cache.{side}.layout", problems) for side in own_sides}
    own.setdefault("v", own["k"])
    widths = {"k": att["head_dim"], "v": att["head_dim"] if att["v_head_dim"] is None else att["v_head_dim"]}
    groups = {side: _group(quants[side], f"cache.{side}", widths[side], problems) for side in own_sides}
    groups.setdefault("v", groups["k"])
    _check_arithmetic(att, quants, problems)
    options = read_options(att, problems)
    params = read_params(att, options, problems)
    rope = read_rope(att["rope"], att["head_dim"], problems)
    if alias:
        check_alias(cache, att, quants["k"], problems)
    if layout is not None:
        _check_dims(layout, own, problems)
        for side in ("k", "v"):
            _check_splits(side, layout, own[side], cache, quants[side], att, problems)
    if problems:
        raise SpecError(problems)
    assert layout is not None
    attention = AttentionSpec(
        q_heads=att["q_heads"],
        kv_heads=att["kv_heads"],
        head_dim=att["head_dim"],
        v_head_dim=att["head_dim"] if att["v_head_dim"] is None else att["v_head_dim"],
        q_dtype=att["q_dtype"],
        scale=att["head_dim"] ** -0.5 if att["scale"] is None else float(att["scale"]),
        causal=att["causal"],
        window=att["window"],
        qk=att["qk"],
        pv=att["pv"],
        options=options,
        params=params,
        rope=rope,
    )
    sides = {
        side: QuantSpec(q["format"], groups[side], q["scale_dtype"], own[side]) for side, q in quants.items()
    }
    found = CacheSpec(cache["page_size"], layout, cache["align"], sides["k"], sides["v"], preset, alias)
    return Spec(top["name"], attention, found)


def _unreadable(source: str | Path, reason: str, hint: str) -> SpecError:
    shown = str(source) if len(str(source)) <= 300 else f"{str(source)[:100]}..."
    return SpecError([Diagnostic(shown, shown, reason[:300], hint)])


def _check_heads(att: dict[str, Any], problems: Problems) -> None:
    q_heads, kv_heads = att["q_heads"], att["kv_heads"]
    if MISSING in (q_heads, kv_heads):
        return
    path = "attention.q_heads"
    if q_heads % kv_heads:
        near = max(kv_heads, q_heads // kv_heads * kv_heads)
        reason = f"not a multiple of kv_heads = {kv_heads}: a query head needs exactly one KV head"
        note(problems, path, q_heads, reason, f"{near} works")
    elif q_heads // kv_heads > 128:
        reason = f"a group of {q_heads // kv_heads} query heads for each KV head; at most 128 are supported"
        note(problems, path, q_heads, reason, f"{128 * kv_heads} works")


def _layout(text: Any, path: str, problems: Problems) -> LayoutSpec | None:
    if text is MISSING or text is None:
        return None
    try:
        return LayoutSpec.parse(text)
    except LayoutError as error:
        note(problems, path, text, str(error))
    return None


def _group(quant: dict[str, Any], path: str, width: Any, problems: Problems) -> tuple[tuple[str, int], ...]:
    group = quant["group"]
    if quant["format"] is MISSING or group is MISSING:
        return ()
    fmt = FORMATS[quant["format"]]
    if not fmt.scaled:
        if group is not None:
            reason = f"{fmt.name} stores values, not scaled codes"
            note(problems, f"{path}.group", group, reason, "leave group out")
        return ()
    if group is None:
        group = {"tok": 1, "head": 1}
    unknown = [key for key in group if isinstance(key, str) and key not in ("tok", "head", "d")]
    for key in unknown:
        note(problems, f"{path}.group.{key}", group[key], "unknown key", nearest(key, ("tok", "head", "d")))
    if unknown:
        return ()
    # Keys may be anything here, so they are compared as a set: they need not sort.
    dims = next((dims for dims in GROUPS if set(dims) == set(group)), None)
    if dims is None or any(type(n) is not int or n != 1 for dim, n in group.items() if dim != "d"):
        works = (
            "{} (per tensor), {head = 1} (per head), {tok = 1, head = 1} (per token and head) "
            "or {tok = 1, head = 1, d = 32} (per 32 elements of those)"
        )
        note(problems, f"{path}.group", group, f"no {fmt.name} kernel scales by this block", works)
        return ()
    if "d" in dims and not _check_d_block(group["d"], fmt, path, width, problems):
        return ()
    return tuple((dim, group[dim]) for dim in dims)


def _check_d_block(block: Any, fmt: Format, path: str, width: Any, problems: Problems) -> bool:
    """Whether blocks of ``block`` elements of d can share a scale: they tile each stored half of a row."""
    if width is MISSING:
        return False
    fits = [b for b in range(D_BLOCK_STEP, width, D_BLOCK_STEP) if width // fmt.packed % b == 0]
    if type(block) is int and block in fits:
        return True
    what = f"head_dim / {fmt.packed}" if fmt.packed > 1 else "head_dim"
    reason = f"not a multiple of {D_BLOCK_STEP} that divides {what} = {width // fmt.packed} into blocks"
    works = f"{', '.join(map(str, fits))} works" if fits else "leave d out: this row is too short for blocks"
    note(problems, f"{path}.group.d", block, reason, works)
    return False


def _check_arithmetic(att: dict[str, Any], quants: dict[str, dict[str, Any]], problems: Problems) -> None:
    integers = ", ".join(repr(fmt.name) for fmt in FORMATS.values() if fmt.integer)
    for key, side in (("qk", "k"), ("pv", "v")):
        name = quants[side]["format"]
        if att[key] == "int8" and name is not MISSING and not FORMATS[name].integer:
            reason = f"cache.{side}.format = {name!r} has no integer codes to multiply"
            note(problems, f"attention.{key}", att[key], reason, f"'exact', or a format of {integers}")


def _check_dims(layout: LayoutSpec, own: dict[str, LayoutSpec | None], problems: Problems) -> None:
    missing = [dim for dim in ("page", "head", "tok", "d") if dim not in layout.dims()]
    if missing:
        reason = f"has no axis for {' and '.join(missing)}"
        note(problems, "cache.layout", str(layout), reason, f"write {_complete(layout)!r}")
        return
    outer, inner = layout.split()
    if any(axis.dim == "d" for axis in outer):
        reason = "kv stands inside d: K and V rows would interleave element by element"
        note(problems, "cache.layout", str(layout), reason, "move kv left of every d axis")
    _check_page(layout, "cache.layout", problems)
    need = {axis.dim for axis in inner}
    for side, spec in own.items():
        if spec is None:
            continue
        path = f"cache.{side}.layout"
        if spec.dims() != need:
            reason = "must name exactly the dimensions right of kv in cache.layout (all where it has no kv)"
            note(problems, path, str(spec), reason, f"'{_join(inner)}' works")
        else:
            _check_page(spec, path, problems)


def _check_page(layout: LayoutSpec, path: str, problems: Problems) -> None:
    if {"page", "d"} <= layout.dims() and layout.position("page") > layout.position("d"):
        reason = "page stands right of a d axis: a token's row would be scattered over the whole pool"
        rest = tuple(axis for axis in layout.axes if axis.dim != "page")
        note(
            problems,
            path,
            str(layout),
            reason,
            f"move page left of every d axis: '{_join((Axis('page'), *rest))}'",
        )


def _complete(layout: LayoutSpec) -> str:
    """The layout with its missing axes put where they belong: page first, head and tok before d."""
    axes = list(layout.axes)
    dims = [axis.dim for axis in axes]
    at = dims.index("d") if "d" in dims else len(axes)
    axes[at:at] = [Axis(dim) for dim in ("head", "tok") if dim not in dims]
    front = [] if "page" in dims else [Axis("page")]
    back = [] if "d" in dims else [Axis("d")]
    return _join((*front, *axes, *back))


def _join(axes: tuple[Axis, ...]) -> str:
    return " ".join(map(str, axes))


def _check_splits(
    side: str,
    layout: LayoutSpec,
    own: LayoutSpec | None,
    cache: dict[str, Any],
    quant: dict[str, Any],
    att: dict[str, Any],
    problems: Problems,
) -> None:
    outer, inner = layout.split()
    axes = outer + (own.axes if own else inner)
    width = "head_dim" if side == "k" or att["v_head_dim"] is None else "v_head_dim"
    size, name = att[width], width
    if (
        quant["format"] is not MISSING
        and size is not MISSING
        and (packed := FORMATS[quant["format"]].packed) > 1
    ):
        size, name = size // packed, f"{width} / {packed} (bytes of a row)"
    sizes = {"tok": (cache["page_size"], "page_size"), "d": (size, name)}
    for dim, (size, name) in sizes.items():
        halves = [axis for axis in axes if axis.dim == dim and axis.part != "whole"]
        if not halves:
            continue
        path = f"cache.{side}.layout" if own and halves[-1] in own.axes else "cache.layout"
        text = str(own if path != "cache.layout" else layout)
        if len(halves) != 2:
            note(problems, path, text, f"splits {dim} across kv with only one half for {side}")
        elif size is not MISSING and size % halves[0].block:
            blocks = [b for b in range(2, size + 1) if size % b == 0]
            near = min(blocks, key=lambda b: abs(b - halves[0].block), default=0)
            reason = f"splits {dim} by {halves[0].block}, which does not divide {name} = {size}"
            hint = f"{dim}/{near} ... {dim}%{near} works" if near else f"{dim} cannot be split here"
            note(problems, path, text, reason, hint)
