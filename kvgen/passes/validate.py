"""validate: a raw mapping (a TOML file, a dict) -> Spec, or every mistake at once.

Field rules live in ``passes.fields``; this file checks what only several fields together show.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvgen.errors import Diagnostic, SpecError
from kvgen.ir import AttentionSpec, CacheSpec, LayoutError, LayoutSpec, QuantSpec, Spec
from kvgen.ir.layout import Axis
from kvgen.ir.quant import FORMATS, GROUPS
from kvgen.passes.fields import ATTENTION, CACHE, MISSING, QUANT, TOP, Problems, read_table


def load_spec(source: str | Path | Mapping[str, Any]) -> Spec:
    """Read a spec from a TOML path or a mapping.

    Raises ``SpecError`` holding all diagnostics, each with path, value, reason and what works.
    """
    if isinstance(source, Mapping):
        return validate(source)
    path = Path(source)
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError([Diagnostic(str(path), str(source), "no such file", "give the path of a TOML spec")]) from None
    except IsADirectoryError:
        raise SpecError([Diagnostic(str(path), str(source), "is a folder", "give a TOML file in it")]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError([Diagnostic(str(path), str(source), f"not TOML: {error}", "see examples/")]) from None
    return validate({"name": path.stem, **raw})


def validate(raw: Mapping[str, Any]) -> Spec:
    """A mapping with ``attention`` and ``cache`` tables -> Spec; ``SpecError`` with every mistake."""
    problems: Problems = []
    top = read_table(TOP, raw, "", problems)
    att = read_table(ATTENTION, top["attention"], "attention", problems)
    cache = read_table(CACHE, top["cache"], "cache", problems)
    quants = {side: read_table(QUANT, cache[side], f"cache.{side}", problems) for side in ("k", "v")}
    _check_heads(att, problems)
    layout = _layout(cache["layout"], "cache.layout", problems)
    own = {side: _layout(q["layout"], f"cache.{side}.layout", problems) for side, q in quants.items()}
    groups = {side: _group(q, att, f"cache.{side}", problems) for side, q in quants.items()}
    if layout is not None:
        _check_dims(layout, own, cache, problems)
        for side in ("k", "v"):
            _check_splits(side, layout, own[side], cache, att, problems)
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
    )
    sides = {
        side: QuantSpec(q["format"], groups[side], q["scale_dtype"], own[side]) for side, q in quants.items()
    }
    return Spec(top["name"], attention, CacheSpec(cache["page_size"], layout, cache["align"], sides["k"], sides["v"]))


def _check_heads(att: dict[str, Any], problems: Problems) -> None:
    q_heads, kv_heads = att["q_heads"], att["kv_heads"]
    if MISSING in (q_heads, kv_heads):
        return
    if q_heads % kv_heads:
        near = max(kv_heads, q_heads // kv_heads * kv_heads)
        problems.append(
            Diagnostic(
                "attention.q_heads",
                q_heads,
                f"not a multiple of kv_heads = {kv_heads}: a query head needs exactly one KV head",
                f"{near} works",
            )
        )
    elif q_heads // kv_heads > 128:
        reason = f"a group of {q_heads // kv_heads} query heads for each KV head; at most 128 are supported"
        problems.append(Diagnostic("attention.q_heads", q_heads, reason, f"{128 * kv_heads} works"))


def _layout(text: Any, path: str, problems: Problems) -> LayoutSpec | None:
    if text is MISSING or text is None:
        return None
    try:
        return LayoutSpec.parse(text)
    except LayoutError as error:
        problems.append(Diagnostic(path, text, str(error)))
        return None


def _group(quant: dict[str, Any], att: dict[str, Any], path: str, problems: Problems) -> tuple[tuple[str, int], ...]:
    fmt = FORMATS.get(quant["format"]) if isinstance(quant["format"], str) else None
    group = quant["group"]
    if fmt is None or group is MISSING:
        return ()
    if not fmt.scaled:
        if group is not None:
            problems.append(
                Diagnostic(f"{path}.group", group, f"{fmt.name} stores values, not scaled codes", "leave group out")
            )
        return ()
    if group is None:
        group = {"tok": 1, "head": 1}
    dims = tuple(sorted(group))
    if dims not in GROUPS or any(block != 1 or isinstance(block, bool) for block in group.values()):
        works = "{} (per tensor), {head = 1} (per head) or {tok = 1, head = 1} (per token and head)"
        problems.append(Diagnostic(f"{path}.group", group, f"no {fmt.name} kernel scales by this block", works))
        return ()
    return tuple((dim, 1) for dim in dims)


def _check_dims(
    layout: LayoutSpec, own: dict[str, LayoutSpec | None], cache: dict[str, Any], problems: Problems
) -> None:
    missing = [dim for dim in ("page", "head", "tok", "d") if dim not in layout.dims()]
    if missing:
        text = str(layout)
        problems.append(
            Diagnostic("cache.layout", text, f"has no axis for {' and '.join(missing)}", f"{text} {' '.join(missing)} works")
        )
        return
    outer, inner = layout.split()
    if any(axis.dim == "d" for axis in outer):
        problems.append(
            Diagnostic(
                "cache.layout",
                str(layout),
                "kv stands inside d: K and V rows would interleave element by element",
                "move kv left of every d axis",
            )
        )
    need = {axis.dim for axis in inner}
    for side, spec in own.items():
        if spec is not None and spec.dims() != need:
            reason = "must name exactly the dimensions right of kv in cache.layout (all of them where it has no kv)"
            problems.append(Diagnostic(f"cache.{side}.layout", str(spec), reason, f"'{_join(inner)}' works"))


def _join(axes: tuple[Axis, ...]) -> str:
    return " ".join(map(str, axes))


def _check_splits(
    side: str,
    layout: LayoutSpec,
    own: LayoutSpec | None,
    cache: dict[str, Any],
    att: dict[str, Any],
    problems: Problems,
) -> None:
    outer, inner = layout.split()
    axes = outer + (own.axes if own else inner)
    width = att["head_dim"] if side == "k" or att["v_head_dim"] is None else att["v_head_dim"]
    sizes = {"tok": (cache["page_size"], "page_size"), "d": (width, "head_dim" if side == "k" else "v_head_dim")}
    for dim in ("tok", "d"):
        halves = [axis for axis in axes if axis.dim == dim and axis.part != "whole"]
        if not halves:
            continue
        size, name = sizes[dim]
        path = f"cache.{side}.layout" if own and halves[-1] in own.axes else "cache.layout"
        text = str(own if path != "cache.layout" else layout)
        if len(halves) != 2:
            problems.append(Diagnostic(path, text, f"splits {dim} across kv with only one half for {side}"))
        elif size is not MISSING and size % halves[0].block:
            blocks = [b for b in range(2, size + 1) if size % b == 0]
            near = min(blocks, key=lambda b: abs(b - halves[0].block)) if blocks else size
            reason = f"splits {dim} by {halves[0].block}, which does not divide {name} = {size}"
            problems.append(Diagnostic(path, text, reason, f"{dim}/{near} ... {dim}%{near} works"))
