"""What a target can do instead of a spec that no schedule of a template fits: changes of it, each tried."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvgen.errors import SpecError
from kvgen.ir import Spec
from kvgen.ir.schedule import Knob

Raw = dict[str, Any]
"""A spec as plain data."""

NARROWER = (512, 384, 320, 256, 192, 128, 96, 64)
"""Head dimensions that are tried, the widest first."""

NARROWED = "head_dim = "

SHOWN = ("head_dim", "v_head_dim", "q_dtype", "k_format", "v_format", "group", "page_size")
"""Facts that a refusal tells."""


def refusal(template: str, facts: Mapping[str, Knob], ways: tuple[str, ...]) -> str:
    """Why there is no kernel, and what would fit."""
    given = ", ".join(f"{name} {facts[name]}" for name in SHOWN)
    hint = f"what would fit: {', or '.join(ways[:2])}" if ways else "nothing near it fits"
    _, _, op = template.rpartition("/")
    return f"{op} on {facts['arch']}: no schedule fits its registers and shared memory for {given}; {hint}"


def ways(spec: Spec, fits: Callable[[Spec], bool]) -> Iterator[str]:
    """The changes of ``changes`` after which ``fits`` says yes, in words; of head dimensions the widest."""
    from kvgen.passes.validate import validate

    narrowed = False
    for words, raw in changes(spec):
        if narrowed and words.startswith(NARROWED):
            continue
        try:
            changed = validate(raw)
        except SpecError:
            continue
        if fits(changed):
            narrowed |= words.startswith(NARROWED)
            yield words


def changes(spec: Spec) -> Iterator[tuple[str, Raw]]:
    """Specs near to ``spec`` that ask less of a target, each with what is changed."""
    raw = spec.to_dict()
    for words, edits in (
        ("groups without d (a scale for each row)", (_rows,)),
        ('q_dtype = "bf16"', (_query,)),
        ('format = "int8"', (_stored("int8"),)),
        ('format = "bf16"', (_stored("bf16"),)),
    ):
        if (found := _edited(raw, *edits)) is not None:
            yield words, found
    for width in NARROWER:
        if (found := _edited(raw, _width(width))) is not None:
            yield f"{NARROWED}{width}", found
    if (found := _edited(raw, _query, _stored("bf16"))) is not None:
        yield 'q_dtype = "bf16" and format = "bf16"', found


def _edited(raw: Raw, *edits: Callable[[Raw], bool]) -> Raw | None:
    """A copy with all edits; None where one of them changes nothing."""
    found = copy.deepcopy(raw)
    changed = [edit(found) for edit in edits]
    return found if all(changed) else None


def _sides(raw: Raw) -> list[Raw]:
    return [raw["cache"][side] for side in ("k", "v") if "alias" not in raw["cache"][side]]


def _rows(raw: Raw) -> bool:
    groups = [own.get("group") or {} for side in _sides(raw) for own in side.get("segments", [side])]
    blocks = [group.pop("d", 1) for group in groups if group.get("tok") == 1]
    return any(block != 1 for block in blocks)


def _query(raw: Raw) -> bool:
    was, raw["attention"]["q_dtype"] = raw["attention"]["q_dtype"], "bf16"
    return bool(was != "bf16")


def _stored(name: str) -> Callable[[Raw], bool]:
    def edit(raw: Raw) -> bool:
        changed = False
        for side in _sides(raw):
            changed |= side.get("format") != name
            layout = {key: side[key] for key in ("layout",) if key in side}
            side.clear()
            side.update({"format": name, **layout})
        return changed

    return edit


def _width(width: int) -> Callable[[Raw], bool]:
    def edit(raw: Raw) -> bool:
        att = raw["attention"]
        was, att["head_dim"] = att["head_dim"], width
        att["v_head_dim"] = min(att.get("v_head_dim") or width, width)
        att.pop("scale", None)
        return bool(was > width)

    return edit
