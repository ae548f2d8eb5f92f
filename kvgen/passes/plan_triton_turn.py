"""plan the rotation of new keys in an append: which elements of each operand are rotated, and with which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvgen.ir import RopeSpec
from kvgen.ir.plan import Constant
from kvgen.passes.plan_triton_tiles import Side


@dataclass(frozen=True)
class Turn:
    """One operand's rotation, as texts over the elements [width] that it holds."""

    partner: str
    """The element that is rotated together with each."""
    angle: str
    """Which of the dim / 2 angles."""
    first: str
    """Whether it is the first of its pair: its partner's sine is subtracted."""
    inside: str
    """Whether it is rotated at all; empty where all are."""


def turns_of(rope: RopeSpec, side: Side) -> Mapping[str, Turn]:
    """The rotation of each of K's operands by its tag; those past ``rope.dim`` have none."""
    found = {}
    for tile, lane in side.lanes:
        name = f"k_d{tile.part.tag}_D"
        start = tile.part.start + lane.shift
        if start < rope.dim:
            inside = start + tile.part.valid <= rope.dim
            found[lane.tag] = turn_of(rope, f"({name} + {lane.shift})" if lane.shift else name, inside)
    return found


def turn_constants(rope: RopeSpec, turns: Mapping[str, Turn]) -> tuple[Constant, ...]:
    """The constants that the texts of ``turns`` name."""
    found = [Constant("ROPE_HALF", rope.dim // 2, "angles: pairs of elements that are rotated together")]
    if rope.pairing == "half" or any(turn.inside for turn in turns.values()):
        found.insert(0, Constant("ROPE_DIM", rope.dim, "elements of a key that are rotated"))
    return tuple(found)


def turn_of(rope: RopeSpec, at: str, inside: bool) -> Turn:
    """The rotation of the elements ``at``; ``inside``: all of them are rotated."""
    limit = "" if inside else f"{at} < ROPE_DIM"
    if rope.pairing == "interleaved":
        return Turn(f"{at} ^ 1", f"{at} // 2", f"{at} % 2 == 0", limit)
    return Turn(f"({at} + ROPE_HALF) % ROPE_DIM", f"{at} % ROPE_HALF", f"{at} < ROPE_HALF", limit)
