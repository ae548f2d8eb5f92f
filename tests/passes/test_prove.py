"""Inequalities are claimed only where they hold for every value."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen.passes.prove import never_below
from tests.support.expressions import evaluate, random_int, read

VALUES = {
    "q_pos": (-9, 20),
    "kv_pos": (0, 20),
    "kv_len": (0, 21),
    "WINDOW": (3, 3),
    "CHUNK": (4, 4),
    "lead": (-3, 9),
}


@settings(max_examples=200)
@given(st.data(), st.fixed_dictionaries({name: st.integers(*ends) for name, ends in VALUES.items()}))
def test_no_false_proofs(data: st.DataObject, values: dict[str, int]) -> None:
    def choose(options: list[object]) -> object:
        return data.draw(st.sampled_from(options))

    node, least = random_int(choose, 2), random_int(choose, 2)
    if never_below(node, least, {"WINDOW": 3, "CHUNK": 4}):
        assert evaluate(node, values) >= evaluate(least, values)


@pytest.mark.parametrize(
    ("node", "least", "holds"),
    [
        ("kv_len + 2", "kv_len", True),
        ("kv_len - 1", "kv_len", False),
        ("kv_len + q_len", "kv_len", True),
        ("kv_len + WINDOW", "kv_len", True),
        ("kv_len - WINDOW", "kv_len", False),
        ("q_pos", "0", False),
        ("max(kv_len, lead[batch])", "kv_len", True),
        ("min(kv_len, lead[batch])", "kv_len", False),
        ("min(kv_len + 1, kv_len + q_len)", "kv_len", True),
        ("(q_pos // CHUNK) * CHUNK + CHUNK", "q_pos + 1", True),
        ("(q_pos // CHUNK) * CHUNK + CHUNK", "q_pos + 2", False),
        ("q_pos", "q_pos // 64 * 64", True),
        ("q_pos // 64 * 64", "q_pos", False),
        ("q_pos // 64 * 64 + 63", "q_pos", True),
        ("kv_len * kv_len", "0", True),
    ],
)
def test_proofs(node: str, least: str, holds: bool) -> None:
    assert never_below(read(node), read(least), {"WINDOW": 3}) == holds
