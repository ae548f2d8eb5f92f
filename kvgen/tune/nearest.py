"""What a target can do instead of a spec that no schedule of a template fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvgen.ir.schedule import Knob

CODES = {"k_bytes": 1, "v_bytes": 1, "k_blocks": 1, "v_blocks": 1}

INSTEAD: tuple[tuple[str, Mapping[str, Knob]], ...] = (
    ("one scale for a row of d", {"k_blocks": 1, "v_blocks": 1}),
    ("a bf16 query", {"q_dtype": "bf16"}),
    ("an int8 cache", {"k_format": "int8", "v_format": "int8", **CODES}),
    ("a bf16 cache", {"k_format": "bf16", "v_format": "bf16", **CODES, "k_bytes": 2, "v_bytes": 2}),
    ("head_dim up to 256", {"head_dim": 256, "v_head_dim": 256}),
    ("head_dim up to 128", {"head_dim": 128, "v_head_dim": 128}),
    (
        "a bf16 query of a bf16 cache",
        {"q_dtype": "bf16", "k_format": "bf16", "v_format": "bf16", **CODES, "k_bytes": 2, "v_bytes": 2},
    ),
)
"""Changes of a spec as its facts, in the order in which they are proposed."""


def refusal(template: str, facts: Mapping[str, Knob], possible: Callable[[Mapping[str, Knob]], bool]) -> str:
    """Why there is no kernel, and the first changes of ``INSTEAD`` after which ``possible`` finds one."""
    shown = ("head_dim", "v_head_dim", "q_dtype", "k_format", "v_format", "group", "page_size")
    given = ", ".join(f"{name} {facts[name]}" for name in shown)
    ways = [name for name, change in INSTEAD if _differs(facts, change) and possible({**facts, **change})]
    hint = f"what would fit: {', or '.join(ways[:2])}" if ways else "nothing near it fits"
    _, _, op = template.rpartition("/")
    return f"{op} on {facts['arch']}: no schedule fits its registers and shared memory for {given}; {hint}"


def _differs(facts: Mapping[str, Knob], change: Mapping[str, Knob]) -> bool:
    smaller = all(
        facts[name] >= value  # type: ignore[operator]
        for name, value in change.items()
        if name in ("head_dim", "v_head_dim", "k_blocks", "v_blocks")
    )
    return smaller and any(facts[name] != value for name, value in change.items())
