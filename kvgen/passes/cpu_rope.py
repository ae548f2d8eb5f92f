"""What kernels that rotate keys to their positions ask the plan on the CPU: append, or what reads K."""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.ir import AttentionSpec
from kvgen.ir.plan import Constant


@dataclass(frozen=True)
class Rotation:
    """How a row of K is rotated to its position: the answer ``rope`` of ``cpp/_rope.jinja``."""

    first: str
    """C++ text of the index of the i-th pair's first element."""
    second: str
    """And of its second."""
    partial: bool
    """Whether elements follow that pass as they are."""
    fenced: bool
    """Whether every product must be rounded before it is summed, and the compiler has to be kept from fusing
    those of interleaved pairs: bytes in the cache are the oracle's."""
    constants: tuple[Constant, ...]
    """What the texts name."""


def rotation(att: AttentionSpec, stored: str) -> Rotation | None:
    """The rotation of keys for a kernel that rotates them where they are ``stored`` so (a name of
    ``ir.rope.STORED``); None where it does not.
    """
    rope = att.rope
    if rope is None or rope.stored != stored:
        return None
    first, second = ("i", "ROPE_DIM / 2 + i") if rope.pairing == "half" else ("2 * i", "2 * i + 1")
    dim = Constant("ROPE_DIM", rope.dim, "elements of a key that are rotated")
    fenced = stored == "post" and rope.pairing == "interleaved"
    return Rotation(first, second, rope.dim < att.head_dim, fenced, (dim,))
