"""Default schedules: the allowed one nearest to the seed, or a refusal that names what would fit."""

from __future__ import annotations

import pytest

from kvgen.errors import UnsupportedError
from kvgen.ir import Schedule
from kvgen.targets import TARGETS
from kvgen.tune.space import Space, load_space, spec_facts
from tests.support.ledger_list import GPUS
from tests.support.specs import make_spec

SM_90 = TARGETS["sm_90"]
FACTS = spec_facts(make_spec("bf16", "bf16", kv_heads=8, group=4, head_dim=128, q_dtype="bf16"), SM_90)


def space(*constraints: str) -> Space:
    return Space(
        template="triton/decode",
        knobs={"tile": (16, 32, 64, 128), "num_warps": (1, 2, 4), "ids": ("inline", "ahead")},
        constraints=constraints,
        numerics=(),
        seeds={"any": {"tile": 128, "num_warps": 2, "ids": "inline"}},
        effort={},
    )


@pytest.mark.parametrize(
    ("constraint", "tile", "warps", "ids"),
    [
        ("tile == 128", 128, 2, "inline"),  # the seed itself
        ("tile <= 32", 32, 2, "inline"),  # fewest steps
        ("tile * 2 <= num_warps * 64", 64, 2, "inline"),
        ("tile == 128 and num_warps != 2", 128, 1, "inline"),  # two as near: canonical order
        ("tile <= 16 or num_warps == 4", 128, 4, "inline"),  # one step rather than three
        ("tile == 64 and ids == 'ahead' or tile == 16", 16, 2, "inline"),  # one knob rather than two
    ],
)
def test_the_default_is_the_allowed_schedule_nearest_to_the_seed(
    constraint: str, tile: int, warps: int, ids: str
) -> None:
    want = Schedule.of({"tile": tile, "num_warps": warps, "ids": ids})
    assert space(constraint).default(SM_90, FACTS) == want


def test_pins_stay_and_count_as_no_change() -> None:
    found = space("tile * num_warps <= 64").default(SM_90, FACTS, {"num_warps": 4})
    assert found == Schedule.of({"tile": 16, "num_warps": 4, "ids": "inline"})
    alone = space("tile <= 32").default(SM_90, FACTS, {"tile": 48})
    assert alone["tile"] == 48, "a pin that allows nothing comes back, for the caller to refuse"


def test_a_refusal_names_what_would_fit() -> None:
    wide = FACTS | {"head_dim": 576, "v_head_dim": 512, "k_format": "e4m3", "v_format": "e4m3", "k_bytes": 1}
    tried = iter(["a bf16 cache", "head_dim = 256", "more"])
    with pytest.raises(UnsupportedError) as raised:
        space("head_dim <= 256 or k_format == 'bf16'").default(SM_90, wide, ways=lambda: tried)
    assert str(raised.value) == (
        "decode on sm_90: no schedule fits its registers and shared memory for head_dim 576, v_head_dim 512, "
        "q_dtype bf16, k_format e4m3, v_format e4m3, group 4, page_size 16; what would fit: a bf16 cache, or "
        "head_dim = 256"
    )
    assert list(tried) == ["more"], "no more are tried than are told"
    with pytest.raises(UnsupportedError, match="nothing near it fits"):
        space("tile > 128").default(SM_90, FACTS)


def test_every_gpu_has_a_schedule_for_odd_heads() -> None:
    for target in GPUS:
        chip = TARGETS[target]
        for head_dim, group in ((56, 71), (200, 7), (576, 1)):
            spec = make_spec("bf16", "bf16", kv_heads=1, group=group, head_dim=head_dim, q_dtype="bf16")
            facts = spec_facts(spec, chip)
            for op in ("decode", "prefill"):
                chosen = load_space(f"triton/{op}")
                assert chosen.allows(chosen.default(chip, facts), facts)
