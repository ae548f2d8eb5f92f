"""The part of validate that knows masks, score terms, parameters, rope and latent V."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from typing import Any

from kvgen.ir import Param, RopeSpec
from kvgen.ir.expression import params_of
from kvgen.ir.quant import QuantSpec, segments_of
from kvgen.ir.spec import freeze
from kvgen.names import suggest
from kvgen.passes.fields import ALIAS, PARAM, ROPE
from kvgen.passes.parse import FUNCTIONS, LARGEST_FLOAT, ExpressionError
from kvgen.passes.reading import MISSING, Problems, note, read_table
from kvgen.passes.terms import POSITIONS, parsed
from kvgen.variants import Definition, Formula, definitions, positions

PARAM_NAME = r"[a-z][a-z0-9_]{0,39}"
MOST_PARAMS = 64
"""Of a spec; the largest example has three."""
TAKEN = r"rope_table|.*_stride_(batch|head|q|kv)"
"""Names of parameters that an argument of a kernel's own could have."""


def read_options(att: dict[str, Any], problems: Problems) -> tuple[tuple[str, Any], ...]:
    """Values of the registered keys that are on, sorted; ``causal`` and ``window`` have their own fields."""
    for found in definitions():
        value = att[found.name]
        if _on(value) and (reason := found.refuse(att)):
            note(problems, f"attention.{found.name}", value, reason, "or leave it out")
    names = {d.name for d in definitions()} - {"causal", "window"}
    return tuple(sorted((name, freeze(att[name])) for name in names if _on(att[name])))


def _on(value: Any) -> bool:
    return value is not MISSING and value is not None and value is not False


def read_params(
    att: dict[str, Any], options: tuple[tuple[str, Any], ...], problems: Problems
) -> tuple[Param, ...]:
    """Declared parameters and those of definitions, sorted; expressions are read for their mistakes."""
    if any(att[key] is MISSING for key in ("q_heads", "params")):
        return ()
    given = {}
    if (count := len(att["params"] or {})) > MOST_PARAMS:
        reason = f"a kernel takes at most {MOST_PARAMS}"
        hint = "leave out what no expression reads"
        note(problems, "attention.params", f"({count} parameters)", reason, hint)
        return ()
    for name, table in (att["params"] or {}).items():
        path = f"attention.params.{name}"
        if not isinstance(name, str) or not re.fullmatch(PARAM_NAME, name):
            note(
                problems,
                "attention.params",
                name,
                "not a name of lower-case letters, digits and _",
                "for example slope",
            )
            continue
        if reason := _taken(name):
            hint = f"call it {name[:30]}_param"
            note(problems, path, table, reason, hint, rename=f"{name[:30]}_param")
            continue
        values = read_table(PARAM, table, path, problems)
        if all(v is not MISSING for v in values.values()) and _check_dims(values, path, problems):
            given[name] = Param(name, tuple(values["dims"]), values["dtype"])
    used = [(d, d.formula(value, att["q_heads"])) for d, value in _chosen(att, options)]
    every = dict(given)
    for _, formula in used:
        for param in formula.params:
            if every.setdefault(param.name, param) != param:
                reason = f"stands for dims {list(param.dims)} of {param.dtype} here"
                note(
                    problems,
                    f"attention.params.{param.name}",
                    att["params"][param.name],
                    reason,
                    "leave it out",
                )
    read = {param.name for _, formula in used for param in formula.params}
    for found, formula in used:
        if found.kind != "sink":
            read |= _read(found, formula, tuple(every.values()), problems)
    for name in given.keys() - read if not problems else ():
        note(
            problems,
            f"attention.params.{name}",
            att["params"][name],
            "no expression reads it",
            "leave it out",
        )
    return tuple(every[name] for name in sorted(every))


def _taken(name: str) -> str:
    """Why a parameter cannot have a name: an expression or a kernel means something else by it; or empty."""
    if keyword.iskeyword(name):
        return f"{name!r} is a word of Python's grammar, which expressions have"
    if name in FUNCTIONS:
        return f"{name!r} is a function of expressions"
    if name in POSITIONS or name == "score":
        return f"{name!r} is a name that expressions have already"
    return f"{name!r} is what kernels call something else" if re.fullmatch(TAKEN, name) else ""


def _chosen(att: dict[str, Any], options: tuple[tuple[str, Any], ...]) -> list[tuple[Definition, Any]]:
    values = dict(options) | {name: att[name] for name in ("causal", "window")}
    return [(d, values[d.name]) for d in definitions() if _on(values.get(d.name))]


def _check_dims(values: dict[str, Any], path: str, problems: Problems) -> bool:
    dims, known = values["dims"], ("batch", "head", "q", "kv")
    unknown = [dim for dim in dims if dim not in known]
    reason = ""
    if unknown:
        reason = f"{unknown[0]!r} is no dimension of a parameter"
    elif not dims or len(set(dims)) != len(dims):
        reason = "names no dimension, or one twice"
    elif values["dtype"] == "bits" and dims[-1] != "kv":
        reason = "bits are packed along kv, which must come last"
    if reason:
        note(problems, f"{path}.dims", dims, reason, f"each of {', '.join(known)} at most once")
    return not reason


def _read(found: Definition, formula: Formula, params: tuple[Param, ...], problems: Problems) -> set[str]:
    """Names of the parameters that an expression reads; a mistake in it is noted with its column."""
    try:
        node = parsed(found.kind, formula, params)
    except ExpressionError as error:
        note(
            problems,
            f"attention.{found.name}",
            formula.text,
            f"column {error.column}: {error.reason}",
            error.hint,
        )
        return {param.name for param in params}
    return set(params_of(node))


def read_rope(table: Any, head_dim: Any, problems: Problems) -> RopeSpec | None:
    """The table [attention.rope]; None where there is none, or a mistake in it."""
    if table is None or table is MISSING:
        return None
    kind = table.get("kind", "default") if isinstance(table, Mapping) else "default"
    if not isinstance(kind, str) or kind not in positions():
        meant = suggest(kind, positions())
        hint = f"did you mean {meant!r}?" if meant else f"the schemes are {', '.join(positions())}"
        works = (meant,) if meant else ()
        note(problems, "attention.rope.kind", kind, "no such position scheme", hint, works=works)
        return None
    own = positions()[kind].fields
    values = read_table({**ROPE, **own}, table, "attention.rope", problems)
    dim = head_dim if values["dim"] is None else values["dim"]
    if any(value is MISSING for value in (dim, *values.values())):
        return None
    if dim > head_dim:
        note(
            problems,
            "attention.rope.dim",
            dim,
            f"more than head_dim = {head_dim}",
            f"{head_dim} works",
            works=(head_dim,),
        )
        return None
    options = tuple(sorted((key, values[key]) for key in own if values[key] is not None))
    rope = RopeSpec(kind, values["pairing"], dim, float(values["theta"]), values["stored"], options)
    try:
        steps, factor = positions()[kind].frequencies(rope)
        finite = all(abs(number) < LARGEST_FLOAT for number in (*steps, factor))
    except (ArithmeticError, ValueError):
        finite = False
    if not finite:
        reason = f"the frequencies of {kind} are not finite with these values"
        note(problems, "attention.rope", table, reason, "see kvgen list positions for an example")
        return None
    return rope


def is_alias(table: Any) -> bool:
    """Whether [cache.v] says that V is a part of K."""
    return isinstance(table, Mapping) and "alias" in table


def check_alias(cache: dict[str, Any], att: dict[str, Any], k: QuantSpec | None, problems: Problems) -> None:
    """Refuse a V inside K that K's rows cannot hold."""
    read_table(ALIAS, cache["v"], "cache.v", problems)
    width, v_width = att["head_dim"], att["v_head_dim"]
    if k is None or width is MISSING or v_width is MISSING:
        return
    if v_width is not None and v_width > width:
        note(
            problems,
            "attention.v_head_dim",
            v_width,
            f"V is a part of K, which has head_dim = {width}",
            f"{width} works",
            works=(width,),
        )
    for part in segments_of("k", width, k):
        if part.quant.fmt.packed > 1:
            reason = "two codes share a byte there, one of them from the second half of the row"
            note(
                problems,
                "cache.k.format",
                part.quant.format,
                reason,
                "use 'int8', or give V memory of its own",
            )
