"""RoPE as a config.json words it: the kinds that are served, and what each needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvgen.models.fields import FIELDS, Rule
from kvgen.models.folder_files import CONFIG, named, refusal, shown

LENGTH = "original_max_position_embeddings"

TABLES = ("rope_parameters", "rope_scaling")
"""The keys that hold RoPE; transformers has used both."""

_FACTOR = Rule("number", 0, above=True)
_OPTIONAL = Rule("number", 0, null=True, above=True)
_GAIN = Rule("number", 0, null=True)
_LENGTH = Rule("integer", 1, (1 << 31) - 1)

FIXED: dict[str, dict[str, Rule]] = {
    "default": {},
    "linear": {"factor": _FACTOR},
    "llama3": {
        "factor": _FACTOR,
        "low_freq_factor": _FACTOR,
        "high_freq_factor": _FACTOR,
        LENGTH: _LENGTH,
    },
    "yarn": {"factor": _FACTOR},
}
"""Kind -> what it needs. Their angles depend on the position alone."""

YARN: dict[str, Rule] = {
    LENGTH: _LENGTH,
    "attention_factor": Rule("number", 0, null=True, above=True),
    "beta_fast": _OPTIONAL,
    "beta_slow": _OPTIONAL,
    "mscale": _GAIN,
    "mscale_all_dim": _GAIN,
    "truncate": Rule("flag", null=True),
}
"""What yarn may have besides."""

ANYWHERE: dict[str, Rule] = {
    "rope_theta": FIELDS["rope_theta"],
    "partial_rotary_factor": FIELDS["partial_rotary_factor"],
    "rope_type": Rule("text"),
    "type": Rule("text"),
    "finetuned": Rule("flag", null=True),
}
"""What every kind may have; ``finetuned`` says how the weights were made."""

LAYER_TYPES = ("full_attention", "sliding_attention")
"""Kinds of ``layer_types`` that are served."""

OTHERS = {
    "dynamic": "its angles change with the longest request of a batch",
    "longrope": "its angles change with the longest request of a batch",
    "su": "its angles change with the longest request of a batch",
    "mrope": "its positions have three parts (time, height, width), and one is served",
}
"""Known kinds that are not served, and why."""


def rope_tables(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each table of RoPE settings with the name of its place; one a layer type where they are nested."""
    for key in TABLES:
        found = config.get(key)
        if isinstance(found, dict) and _nested(found):
            yield from ((f"{key}.{name}", table) for name, table in found.items() if isinstance(table, dict))
        elif isinstance(found, dict) and found:
            yield key, found


def _nested(table: dict[str, Any]) -> bool:
    """Whether a table holds one for each type of layer."""
    return any(name in LAYER_TYPES for name in table)


def kind_of(table: dict[str, Any]) -> str:
    """The name of a table's kind."""
    return str(table.get("rope_type") or table.get("type") or "default")


def rope_obstacles(config: dict[str, Any], *, by_type: bool) -> list[str]:
    """What stands in tables of RoPE and is not computed here.

    ``by_type``: whether the model's code reads ``rope_parameters`` by the type of a layer.
    """
    found = _misplaced(config, by_type)
    for where, table in rope_tables(config):
        kind = kind_of(table)
        if kind not in FIXED or "mrope_section" in table:
            name = kind if kind not in FIXED else "mrope"
            why = OTHERS.get(name, f"the kinds that are served are {', '.join(FIXED)}")
            found.append(f"{where}: RoPE of kind {named(name)}: {why}")
            continue
        if table.get("type", kind) != kind:
            found.append(f"{where}: rope_type = {kind} and type = {shown(table['type'])}: keep one of them")
        known = {**ANYWHERE, **FIXED[kind], **(YARN if kind == "yarn" else {}), LENGTH: _LENGTH}
        found += [
            f"{where}.{named(key)} = {shown(table[key])}: RoPE of kind {kind} has no such setting"
            for key in sorted(set(table) - set(known))
            if table[key] is not None
        ]
        if kind != "default" and config.get(LENGTH) not in (None, table.get(LENGTH)):
            found.append(f"{LENGTH} = {shown(config[LENGTH])}: {where} has {shown(table.get(LENGTH))}")
    for where, table in [("", config), *((f"{place}.", table) for place, table in rope_tables(config))]:
        share = table.get("partial_rotary_factor")
        if share not in (None, 1):
            why = "rows are rotated whole; only 1 or null is served"
            found.append(f"{where}partial_rotary_factor = {shown(share)}: {why}")
    return found


def _misplaced(config: dict[str, Any], by_type: bool) -> list[str]:
    """Tables where the model's code does not look for them."""
    new, old = (config.get(key) or {} for key in TABLES)
    found = []
    if new and old and new != old:
        found.append("rope_parameters and rope_scaling differ: keep one of them")
    if _nested(old) or (new and _nested(new) != by_type):
        which = "by layer type" if by_type and not _nested(old) else "for all layers together"
        found.append(f"{'rope_scaling' if _nested(old) else 'rope_parameters'}: must be given {which}")
    if _nested(new):
        found += [
            f"rope_parameters.{named(key)} = {shown(value)}: neither a table nor a type of layer"
            for key, value in new.items()
            if key not in LAYER_TYPES or not isinstance(value, dict)
        ]
    return found


def check_rope(config: dict[str, Any], folder: Path) -> None:
    """Raise ``ArgumentError`` for a setting of RoPE that is missing or holds what it may not.

    Give what ``rope_obstacles`` lets pass.
    """
    path = folder / CONFIG
    for where, table in rope_tables(config):
        kind = kind_of(table)
        for key, rule in {**ANYWHERE, **(YARN if kind == "yarn" else {}), **FIXED[kind]}.items():
            if key not in table and key not in FIXED[kind]:
                continue
            if key not in table:
                raise refusal(path, f"{where}.{key}", None, f"RoPE of kind {kind} needs it", rule.wanted)
            if fault := rule.fault(table[key]):
                raise refusal(path, f"{where}.{key}", table[key], fault, rule.wanted)
        if kind == "llama3" and table["high_freq_factor"] <= table["low_freq_factor"]:
            reason = f"not above low_freq_factor = {table['low_freq_factor']}"
            key, hint = "high_freq_factor", "give a larger number"
            raise refusal(path, f"{where}.{key}", table[key], reason, hint)
