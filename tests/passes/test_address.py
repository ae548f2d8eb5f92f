"""Addresses: simplified ones equal the placement for every index, and every term's width is proven."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sympy import Integer

from kvgen.ir import Spec
from kvgen.ir.verify import VerifyError
from kvgen.passes.address import Address, Term, address, plane_facts, simplify
from kvgen.passes.integers import FloorDiv, Mod, Range, bounds, evaluate, reduce_divisions, symbol
from kvgen.passes.place import place
from kvgen.passes.printers import print_c, print_python
from kvgen.passes.validate import validate
from kvgen.passes.verify_address import verify_address
from tests.support.specs import covering_specs, make_spec, specs

X = symbol("x")


def split(inner: str) -> Spec:
    """An HND spec whose K has inner axes of its own."""
    raw = make_spec(layout="hnd").to_dict()
    raw["cache"]["k"]["layout"] = inner
    return validate(raw)


def simplified(spec: Spec, name: str) -> Address:
    """The simplified address of one plane of a spec."""
    plane = place(spec).plane(name)
    return simplify(address(plane), plane_facts(plane))


@given(specs())
def test_every_address_is_its_placement(spec: Spec) -> None:
    for plane in place(spec).planes:
        verify_address(plane, address(plane))
        verify_address(plane, simplify(address(plane), plane_facts(plane)))


def test_a_wrong_address_is_caught() -> None:
    plane = place(make_spec(layout="hnd")).plane("k")
    good = simplify(address(plane), plane_facts(plane))
    for at, term in enumerate(good.terms):
        for change in ({"index": term.index + 1}, {"stride": (term.stride or 1) + 1}):
            terms = (*good.terms[:at], dataclasses.replace(term, **change), *good.terms[at + 1 :])
            with pytest.raises(VerifyError, match="k: address of"):
                verify_address(plane, Address("k", terms))


def test_a_term_that_needs_64_bits_says_so() -> None:
    big = make_spec(layout="hnd", page_size=4096, kv_heads=4096, group=1, head_dim=576)
    found = simplified(big, "k")
    (head,) = found.of("head")
    assert head.wide
    assert head.limit == 4095 * (head.stride or 0) >= 2**31
    assert "(int64_t)(h) * K_STRIDE_HEAD" in found.c(head="h")
    assert "h.to(tl.int64) * K_STRIDE_HEAD" in found.triton(head="h")
    narrow = dataclasses.replace(head, wide=False)
    with pytest.raises(VerifyError, match="in 32 bits"):
        verify_address(
            place(big).plane("k"),
            Address("k", (narrow, *found.terms)[:1] + found.terms[:1] + found.terms[2:]),
        )


def test_page_ids_are_always_widened() -> None:
    found = simplified(make_spec(layout="hnd"), "k")
    assert found.triton(page="page") == "page.to(tl.int64) * k_stride_page"
    strides = {"k_stride_page": 2**31 + 64}
    assert found.at(strides, page=3, head=0, tok=0, d=0) == 3 * (2**31 + 64)


def test_nested_splits_join_and_others_stay() -> None:
    joined = simplified(split("head tok d/8 d%8"), "k")
    assert joined.c(d="d") == "d"
    packed = simplified(make_spec(layout="packed-k"), "k")
    assert packed.c(d="d") == "(d / 8) * K_STRIDE_D_OUTER + (d % 8)"
    assert packed.stride("d") is None
    assert joined.stride("d") == 1


@pytest.mark.parametrize("spec", covering_specs(0)[::9], ids=lambda s: s.hash8)
def test_at_agrees_with_the_strides_of_the_view(spec: Spec) -> None:
    record = place(spec)
    for plane in record.planes:
        found = simplify(address(plane), plane_facts(plane))
        pages = 3
        run_time = {
            f"{plane.name}_stride_{a.axis.key}": a.stride.at(pages) // plane.itemsize for a in plane.axes
        }
        shape = {a.axis.dim for a in plane.axes}
        last = {"page": 2, "head": spec.attention.kv_heads - 1, "tok": spec.cache.page_size - 1, "d": 15}
        want = sum(
            a.axis.index(last[a.axis.dim]) * (a.stride.at(pages) // plane.itemsize) for a in plane.axes
        )
        assert found.at(run_time, **{dim: last[dim] for dim in shape}) == want


SHAPES = (
    lambda a, b: FloorDiv(X, Integer(a)),
    lambda a, b: Mod(X, Integer(a)),
    lambda a, b: FloorDiv(Mod(X, Integer(a * b)), Integer(b)),
    lambda a, b: Mod(Mod(X, Integer(a * b)), Integer(b)),
    lambda a, b: FloorDiv(FloorDiv(X, Integer(a)), Integer(b)),
    lambda a, b: FloorDiv(X * a * b + Mod(X, Integer(a)), Integer(a)),
    lambda a, b: Mod(X * a + Mod(X, Integer(b)), Integer(a)),
)


@given(st.sampled_from(SHAPES), st.integers(1, 9), st.integers(1, 9), st.integers(0, 300))
def test_reduction_keeps_the_value_and_the_bounds_hold(shape, a: int, b: int, high: int) -> None:
    expr = shape(a, b)
    facts = {X: Range(0, high)}
    reduced = reduce_divisions(expr, facts)
    limits = bounds(reduced, facts)
    for value in range(0, high + 1, max(1, high // 17)):
        got = evaluate(reduced, {"x": value})
        assert got == evaluate(expr, {"x": value})
        assert limits.low <= got <= limits.high


def test_printers_parenthesise() -> None:
    expr = FloorDiv(X + 3, Integer(4)) * 2
    assert print_c(expr, {"x": "a + b"}) == "2 * ((3 + (a + b)) / 4)"
    assert print_python(Mod(X, Integer(8)), {"x": "d_D[None, :]"}) == "(d_D[None, :] % 8)"


def test_terms_know_their_width_only_after_simplify() -> None:
    raw = address(place(make_spec(layout="hnd")).plane("v"))
    assert all(isinstance(term, Term) and term.wide and term.limit is None for term in raw.terms)
