"""Layout strings: what they mean, and that a wrong one says where and why."""

from __future__ import annotations

import pytest
from hypothesis import given

from kvgen.ir import Axis, Extent, LayoutError, LayoutSpec, Spec
from tests.support.specs import specs


@pytest.mark.parametrize(
    "text", ["page kv head tok d", "kv page tok head d", "page head d/8 tok d%8", "tok/4 page head tok%4 d"]
)
def test_text_round_trip(text: str) -> None:
    assert str(LayoutSpec.parse(text)) == text
    assert LayoutSpec.parse(f"  {text.replace(' ', '   ')} ") == LayoutSpec.parse(text)


@given(specs())
def test_any_layout_round_trips(spec: Spec) -> None:
    assert LayoutSpec.parse(str(spec.cache.layout)) == spec.cache.layout


@pytest.mark.parametrize(
    "text, axis, reason",
    [
        ("", "", "empty"),
        ("page kv head tok D", "'D'", "is not an axis"),
        ("page kv head tok dim", "'dim'", "names no dimension"),
        ("page kv head/2 tok d head%2", "'head/2'", "only tok and d can be split"),
        ("page tok head tok d", "'tok'", "names tok again"),
        ("page tok head d/8 d", "'d'", "names d again"),
        ("page tok head d/8", "'d/8'", "its other half d%8 is missing"),
        ("page tok head d%8", "'d%8'", "its other half d/8 is missing"),
        ("page tok head d/8 d%4", "'d%4'", "another block"),
        ("page tok d%8 head d/8", "'d%8'", "write the outer half first"),
        ("page tok head d/1 d%1", "'d/1'", "splits nothing"),
        ("page tok head d/٨ d%٨", "'d/٨'", "is not an axis"),
        ("page, tok, head, d", "'page,'", "is not an axis"),
    ],
)
def test_wrong_strings_name_the_axis(text: str, axis: str, reason: str) -> None:
    with pytest.raises(LayoutError) as caught:
        LayoutSpec.parse(text)
    assert axis in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize("size, block", [(16, 4), (24, 3), (8, 8)])
def test_split_axes_enumerate_their_dimension(size: int, block: int) -> None:
    outer, inner = Axis("tok", "outer", block), Axis("tok", "inner", block)
    seen = [(outer.index(t), inner.index(t)) for t in range(size)]
    assert seen == [(o, i) for o in range(outer.extent(size)) for i in range(inner.extent(size))]


def test_extents_are_linear_in_the_number_of_pages() -> None:
    total = Extent(64, 10).times(3) + Extent(1, 2)
    assert (total, total.at(0), total.at(5), str(total)) == (
        Extent(193, 32),
        193,
        353,
        "193 + 32 * num_pages",
    )
