"""validate: a raw mapping (a TOML file, a dict) -> Spec, or every mistake at once.

Field rules live in ``passes.fields``; this file checks what only several fields together show.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvgen.definitions import load_installed
from kvgen.errors import SpecError
from kvgen.ir import AttentionSpec, CacheSpec, Spec
from kvgen.ir.cache import PRESETS
from kvgen.ir.quant import segments_of
from kvgen.passes.check_attention import check_alias, is_alias, read_options, read_params, read_rope
from kvgen.passes.check_layout import check_dims, check_splits, read_layout
from kvgen.passes.check_quant import Around, read_quant
from kvgen.passes.check_sides import check_arithmetic, check_raw, check_transforms
from kvgen.passes.fields import CACHE, MOST_LAYOUT, TOP
from kvgen.passes.reading import MISSING, Problems, note, read_table
from kvgen.passes.toml_file import read_toml
from kvgen.variants import attention_fields


def load_spec(source: str | Path | Mapping[str, Any]) -> Spec:
    """Read a spec from a TOML path or a mapping.

    Raises ``SpecError`` holding all diagnostics, each with path, value, reason and what works.
    """
    load_installed()
    if not isinstance(source, str | Path):
        return validate(source)
    raw = read_toml(source)
    return validate({"name": re.sub(r"[^\w.+-]", "_", Path(source).stem)[:100], **raw})


def validate(raw: Any) -> Spec:
    """A mapping with ``attention`` and ``cache`` tables -> Spec; ``SpecError`` with every mistake."""
    problems: Problems = []
    top = read_table(TOP, raw, "", problems)
    if not isinstance(raw, Mapping):
        raise SpecError(problems)
    att = read_table(attention_fields(), top["attention"], "attention", problems)
    cache = read_table(CACHE, top["cache"], "cache", problems)
    alias = is_alias(cache["v"])
    own_sides = ("k",) if alias else ("k", "v")
    widths = {"k": att["head_dim"], "v": att["head_dim"] if att["v_head_dim"] is None else att["v_head_dim"]}
    quants = {
        side: read_quant(cache[side], Around(side, widths[side], cache["page_size"]), problems)
        for side in own_sides
    }
    quants.setdefault("v", quants["k"])
    _check_heads(att, problems)
    preset = cache["layout"] if cache["layout"] in PRESETS else None
    layout = read_layout(PRESETS[preset] if preset else cache["layout"], "cache.layout", problems)
    texts = {
        side: cache[side].get("layout") if isinstance(cache[side], Mapping) else None for side in own_sides
    }
    for side, text in texts.items():
        if preset and isinstance(text, str):
            reason = f"cache.layout = {preset!r} chooses the axes of both sides by itself"
            note(problems, f"cache.{side}.layout", text, reason, "leave one of the two out")
    own = {side: read_layout(_text(text), f"cache.{side}.layout", problems) for side, text in texts.items()}
    own.setdefault("v", own["k"])
    options = read_options(att, problems)
    params = read_params(att, options, problems)
    rope = read_rope(att["rope"], att["head_dim"], problems)
    if alias:
        check_alias(cache, att, quants["k"], problems)
    if layout is not None:
        check_dims(layout, own, problems)
        for side in ("k", "v"):
            quant, width = quants[side], widths["k" if alias else side]
            inline = quant is not None and quant.scales == "inline"
            known = quant is not None and width is not MISSING
            parts = segments_of(side, width, quant) if known and quant else ()
            name = "head_dim" if side == "k" or alias or att["v_head_dim"] is None else "v_head_dim"
            check_splits(side, layout, own[side], cache["page_size"], name, parts, inline, problems)
    sides = {side: quant and replace(quant, layout=own[side]) for side, quant in quants.items()}
    check_arithmetic(att, sides, cache, problems)
    check_transforms(sides, rope, alias, problems)
    check_raw(cache, sides, problems)
    if problems:
        raise SpecError(problems)
    assert layout is not None and sides["k"] is not None and sides["v"] is not None
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
    found = CacheSpec(
        cache["page_size"],
        layout,
        cache["align"],
        sides["k"],
        sides["v"],
        preset,
        alias,
        cache["keep_first"],
        cache["keep_last"],
    )
    return Spec(top["name"], attention, found)


def _text(text: Any) -> str | None:
    """A layout string as it is; what is none was refused with the rest of its table."""
    return text if isinstance(text, str) and len(text) <= MOST_LAYOUT else None


def _check_heads(att: dict[str, Any], problems: Problems) -> None:
    q_heads, kv_heads = att["q_heads"], att["kv_heads"]
    if MISSING in (q_heads, kv_heads):
        return
    path = "attention.q_heads"
    if q_heads % kv_heads:
        near = max(kv_heads, q_heads // kv_heads * kv_heads)
        reason = f"not a multiple of kv_heads = {kv_heads}: a query head needs exactly one KV head"
        note(problems, path, q_heads, reason, f"{near} works", works=(near,))
    elif q_heads // kv_heads > 128:
        reason = f"a group of {q_heads // kv_heads} query heads for each KV head; at most 128 are supported"
        note(problems, path, q_heads, reason, f"{128 * kv_heads} works", works=(128 * kv_heads,))
