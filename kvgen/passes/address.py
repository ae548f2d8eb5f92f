"""address and simplify: a Plane -> one symbolic expression for the element at (page, head, tok, d).

An address is a sum of terms ``index(dim) * stride``, counted in elements of the plane's type from
its base. Strides inside a page are constants; ``page`` and the axes left of it are run-time
arguments. ``simplify`` joins split axes whose strides nest, removes the divisions that the facts
decide, and proves for each term whether 32 bits hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from sympy import Expr, Integer

from kvgen.ir import Plane
from kvgen.passes.integers import (
    Facts,
    FloorDiv,
    Mod,
    Range,
    bounds,
    evaluate,
    reduce_divisions,
    symbol,
)
from kvgen.passes.printers import print_c, print_python

Printer = Callable[[Expr, Mapping[str, str]], str]
"""Prints an index expression with names put in for its symbols."""

PAGE_IDS = Range(0, 2**31 - 1)
"""Page ids are int32 and non-negative."""


@dataclass(frozen=True)
class Term:
    """``index * stride``: one summand of an address, in elements."""

    dim: str
    """Logical dimension that ``index`` depends on."""
    index: Expr
    """Integer expression over the symbol named ``dim``."""
    stride_name: str
    """Name of the stride in generated code: K_STRIDE_TOK (constant) or k_stride_page (argument)."""
    stride: int | None
    """Elements per step, or None when it is passed at run time."""
    wide: bool = True
    """Whether the term needs 64 bits (proven by ``simplify``; true until then)."""
    limit: int | None = None
    """Largest value of the term in elements, or None when the stride is not known here."""


@dataclass(frozen=True)
class Address:
    """The element address of a plane."""

    plane: str
    terms: tuple[Term, ...]

    def of(self, dim: str) -> tuple[Term, ...]:
        """The terms that depend on ``dim``."""
        return tuple(term for term in self.terms if term.dim == dim)

    def stride(self, dim: str) -> int | None:
        """Elements from one index of ``dim`` to the next where that is one constant, else None."""
        terms = self.of(dim)
        plain = len(terms) == 1 and terms[0].index == symbol(dim)
        return terms[0].stride if plain else (0 if not terms else None)

    def c(self, **index: str) -> str:
        """The terms of the given dims as C++ text, each dim replaced by the text given for it.

        Run-time strides are fields of the argument struct ``a``.
        """
        return self._text(index, print_c, "(int64_t)({})", "a.", runtime_is_wide=True)

    def triton(self, **index: str) -> str:
        """The same as Triton text; wide terms are cast before they are multiplied.

        A run-time stride does not widen its term: Triton types a small integer argument as i32.
        """
        return self._text(index, print_python, "{}.to(tl.int64)", "", runtime_is_wide=False)

    def at(self, strides: Mapping[str, int], **index: int) -> int:
        """The address as a plain integer (for proofs and tests); ``strides`` gives run-time ones."""
        total = 0
        for term in self.terms:
            step = strides[term.stride_name] if term.stride is None else term.stride
            total += int(evaluate(term.index, index)) * step
        return total

    def _text(
        self, index: Mapping[str, str], show: Printer, cast: str, owner: str, *, runtime_is_wide: bool
    ) -> str:
        parts = []
        for term in self.terms:
            if term.dim not in index:
                continue
            code = show(term.index, {term.dim: index[term.dim]})
            if term.wide and not (runtime_is_wide and term.stride is None):
                code = cast.format(code)
            parts.append(
                code
                if term.stride == 1
                else f"{code} * {owner if term.stride is None else ''}{term.stride_name}"
            )
        return " + ".join(parts) or "0"


def address(plane: Plane) -> Address:
    """The address of a plane as the layout string spells it, nothing simplified."""
    terms = []
    for placed in plane.axes:
        axis, var = placed.axis, symbol(placed.axis.dim)
        index: Expr = var
        if axis.part == "outer":
            index = FloorDiv(var, Integer(axis.block))
        elif axis.part == "inner":
            index = Mod(var, Integer(axis.block))
        name = f"{plane.name}_stride_{axis.key}"
        stride = placed.stride.fixed // plane.itemsize if placed.constant else None
        terms.append(Term(axis.dim, index, name.upper() if placed.constant else name, stride))
    return Address(plane.name, tuple(terms))


def plane_facts(plane: Plane) -> Facts:
    """The range of each logical index of a plane, from its extents."""
    return {symbol("page"): PAGE_IDS} | {
        symbol(dim): Range(0, size - 1) for dim, size in plane.index_sizes().items()
    }


def simplify(raw: Address, facts: Facts) -> Address:
    """The same address with fewer operations and a proven width for every term."""
    terms = [replace(term, index=reduce_divisions(term.index, facts)) for term in _join_splits(raw.terms)]
    return Address(raw.plane, tuple(_with_width(term, facts) for term in terms if term.index != 0))


def _join_splits(terms: tuple[Term, ...]) -> list[Term]:
    """``(x // b) * (b * s) + (x % b) * s`` is ``x * s``: one term where the strides nest."""
    joined: list[Term] = []
    for term in terms:
        if isinstance(term.index, Mod) and term.stride is not None:
            block = int(term.index.args[1])
            for at, other in enumerate(joined):
                nested = isinstance(other.index, FloorDiv) and other.dim == term.dim
                if nested and other.stride == block * term.stride:
                    name = term.stride_name.removesuffix("_INNER")
                    joined[at] = replace(term, index=term.index.args[0], stride_name=name)
                    break
            else:
                joined.append(term)
        else:
            joined.append(term)
    return joined


def _with_width(term: Term, facts: Facts) -> Term:
    if term.stride is None:
        return term
    limit = bounds(term.index, facts).high * term.stride
    return replace(term, limit=limit, wide=limit >= 2**31)
