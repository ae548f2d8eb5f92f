"""Bounds of what a block of queries sees, as C++ text for ``key_range`` and ``full_range``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvgen.ir import Param
from kvgen.ir.expression import Load, Name, Node, Number, Op, names_of, params_of
from kvgen.passes.cpu_loads import element, printed
from kvgen.passes.print_terms import helpers
from kvgen.passes.simplify import simplify, substitute
from kvgen.passes.terms import Masking


@dataclass(frozen=True)
class Range:
    """Bounds of the keys that a block of queries sees, as C++ text; empty where there is none."""

    lo: str = ""
    hi: str = ""
    full_lo: str = ""
    full_hi: str = ""
    reads: bool = False
    """Whether ``lo`` and ``hi`` read parameters, or the request's number."""
    full_reads: bool = False
    """And the other two."""
    careful: bool = False
    """Whether ``lo`` and ``hi`` read a parameter at a position: there is none without rows and keys."""
    full_careful: bool = False
    q_len: bool = False
    full_q_len: bool = False
    full_kv_len: bool = False
    shortens: bool = False
    """Whether pages of a request may be read by none of its queries."""
    helpers: frozenset[str] = frozenset()
    """Names in ``HELPERS`` of what they call."""

    @property
    def bounded(self) -> bool:
        """Whether fewer keys than all of the request's may be read."""
        return bool(self.lo or self.hi)


def key_range(masking: Masking, params: Iterable[Param]) -> Range:
    """The bounds of a kernel, over ``pos_first``, ``pos_last``, ``kv_len`` and what the flags name."""
    known = {param.name: param for param in params}
    outer = [node for node in (masking.lo, masking.hi) if node is not None]
    inner = [node for node in (masking.full_lo, masking.full_hi) if node is not None]

    def loaded(load: Load) -> str:
        return element(known[load.param], load, text)

    def text(node: Node | None) -> str:
        if node is None:
            return ""
        return printed(node, {"batch": "b"}, loaded)

    def used(nodes: list[Node]) -> frozenset[str]:
        return frozenset[str]().union(*(names_of(node) for node in nodes))

    def read(nodes: list[Node]) -> list[Param]:
        return [known[name] for node in nodes for name in params_of(node)]

    return Range(
        text(masking.lo),
        text(masking.hi),
        text(masking.full_lo),
        text(masking.full_hi),
        reads="batch" in used(outer) or bool(read(outer)),
        full_reads="batch" in used(inner) or bool(read(inner)),
        careful=any("kv" in param.dims for param in read(outer)),
        full_careful=any("kv" in param.dims for param in read(inner)),
        q_len="q_len" in used(outer),
        full_q_len="q_len" in used(inner),
        full_kv_len="kv_len" in used(inner),
        shortens=masking.lo is not None or not _is_kv_len(masking.hi),
        helpers=frozenset(name for node in outer + inner for name in helpers(node)),
    )


def _is_kv_len(hi: Node | None) -> bool:
    """Whether all queries of a request together see its last key."""
    if hi is None:
        return True
    ends = {
        "pos_first": Op("-", (Name("kv_len"), Name("q_len"))),
        "pos_last": Op("-", (Name("kv_len"), Number(1))),
    }
    return simplify(substitute(hi, ends)) == Name("kv_len")
