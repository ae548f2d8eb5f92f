"""Pins are used as given or refused; knobs that make no difference are neither stated nor tried."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from kvgen.backends.protocol import Backend
from kvgen.builder import assemble
from kvgen.errors import ArgumentError, UnsupportedError
from kvgen.ir import Spec
from kvgen.ir.schedule import Schedule
from kvgen.passes.abi import VARIANTS
from kvgen.passes.place import place
from kvgen.passes.render import render
from kvgen.passes.validate import load_spec
from kvgen.resolve import backend_for, resolve_target
from kvgen.tune.pins import ignored
from kvgen.tune.search import fingerprint
from kvgen.tune.space import space_of, spec_facts
from kvgen.tune.tuner import tune
from tests.support.faults import small
from tests.support.specs import make_spec

KIVI = {"format": "int4", "affine": True, "scale_dtype": "f16"}


def paged(kv_heads: int = 2, page: int = 16, **attention: Any) -> Spec:
    return load_spec(
        {
            "attention": {"q_heads": 4 * kv_heads, "kv_heads": kv_heads, "head_dim": 64} | attention,
            "cache": {"page_size": page, "k": {"format": "int8"}, "v": {"format": "int8"}},
        }
    )


def kivi() -> Spec:
    return load_spec(
        {
            "attention": {"q_heads": 8, "kv_heads": 2, "head_dim": 64},
            "cache": {
                "page_size": 32,
                "k": KIVI | {"group": {"head": 1, "tok": 32, "d": 1}},
                "v": KIVI | {"group": {"head": 1, "tok": 1, "d": 32}},
            },
        }
    )


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_pins_leave_the_other_knobs_room(kv_heads: int) -> None:
    """The docstring's own example was refused on 2 and 4 KV heads, for a knob that nobody had set."""
    lib = assemble(paged(kv_heads), "cpu-portable", schedule={"decode": {"split_tokens": 64}})
    assert lib.schedules["decode"]["split_tokens"] == 64
    assert kv_heads % lib.schedules["decode"].int("heads") == 0
    assert lib._plan("decode", "single").constant("SPLIT") == 64


@pytest.mark.parametrize(
    ("op", "pins", "says"),
    [
        ("decode", {"tile": 33}, r"\['tile'\] = 33: the kernel would take 32 \(.* 16 tokens .*\); give 32"),
        ("decode", {"split_tokens": 100}, r"would take 128 \(whole tiles\); give 128"),
        ("prefill", {"rows": 130}, r"would take 128 \(whole queries of 4 heads\); give 128"),
        ("decode", {"tile": 0}, r"\['tile'\] = 0: give 1 to 1048576, for example 16"),
        ("decode", {"row_block": 3}, r"\['row_block'\] = 3: give one of 1, 2, 4"),
        ("decode", {"heads": 3}, r"\{'heads': 3\}: breaks the constraint 'kv_heads % heads == 0'"),
        ("decode", {"tile": 256, "split_tokens": 64}, r"breaks the constraint 'split_tokens >= tile'"),
    ],
)
def test_a_pin_that_would_not_be_used_as_given_is_refused(op: str, pins: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        assemble(paged(), "cpu-portable", schedule={op: pins})
    with pytest.raises(ArgumentError, match=says):
        tune(paged(), "cpu-portable", ops=[op], pins={op: pins})


def test_values_that_no_list_holds_are_used() -> None:
    lib = assemble(paged(), "cpu-portable", schedule={"decode": {"tile": 48}, "prefill": {"rows": 132}})
    assert lib._plan("decode", "single").constant("TILE") == 48
    assert lib._plan("prefill", "").constant("Q_TILE") == 33


@pytest.mark.parametrize(
    ("pins", "says"),
    [
        ({"tile": 33}, "give one of 16, 32, 64, 128"),
        ({"num_warps": 3}, "give one of 1, 2, 4, 8"),
        ({"ids": "sideways"}, "give one of 'inline', 'ahead'"),
    ],
)
def test_a_gpu_kernel_takes_what_its_compiler_can(pins: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        assemble(paged(), "sm_90", schedule={"decode": pins})


def test_a_pin_that_makes_no_difference_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"\['ids'\] = 'ahead': decode .* is the same whatever its value"):
        assemble(kivi(), "sm_90", schedule={"decode": {"ids": "ahead"}})
    assemble(paged(), "sm_90", schedule={"decode": {"ids": "ahead"}})


SPECS = {
    "kivi": kivi(),
    "int8": paged(),
    "group of 1": paged(q_heads=2),
    "group of 16": paged(q_heads=32),
    "f32": small(),
    "heads apart": paged(mask="kv_pos % 2 == head % 2"),
    "int4 blocks": make_spec("int4-block", "int4-block", kv_heads=2, group=4, head_dim=64, q_dtype="bf16"),
}


@cache
def backend(name: str) -> Backend:
    return backend_for(resolve_target(name))


def kernels(spec: Spec, target: str, op: str, schedule: Schedule) -> dict[str, str] | None:
    """Variant -> code of the kernel; None where the schedule has none."""
    found = {}
    for variant in VARIANTS[op]:
        try:
            plan = backend(target).plan(op, spec, place(spec), schedule, resolve_target(target), variant)
        except UnsupportedError:
            return None
        text = render(plan)
        (line,) = (line for line in text.splitlines() if line.startswith(("schedule: ", "// schedule: ")))
        stated = [word.partition("=")[0] for word in line.split()[1:] if "=" in word]
        assert stated == [knob for knob in schedule if knob not in plan.ignored], (
            "the header says what matters"
        )
        found[f"{variant} {' '.join(plan.ignored)}"] = fingerprint(plan, text)
    return found


@pytest.mark.parametrize("target", ["cpu-avx512", "cpu-portable", "sm_90", "gfx942"])
@pytest.mark.parametrize("name", SPECS)
def test_a_knob_is_ignored_just_where_it_makes_no_difference(name: str, target: str) -> None:
    spec, chip = SPECS[name], resolve_target(target)
    facts = spec_facts(spec, chip)
    for op in ("decode", "prefill"):
        space = space_of(op, chip)
        schedule = space.default(chip, facts)
        base = kernels(spec, target, op, schedule)
        assert base is not None
        idle = ignored(backend(target), op, spec, place(spec), chip, schedule)
        for knob, values in space.knobs.items():
            others = [schedule.replace(**{knob: value}) for value in values if value != schedule[knob]]
            tried = [kernels(spec, target, op, other) for other in others if space.allows(other, facts)]
            same = [found == base for found in tried if found is not None]
            if same:
                assert all(same) == (knob in idle), (op, knob)


def test_what_makes_no_difference_is_not_enumerated() -> None:
    chip = resolve_target("sm_90")
    space, facts = space_of("decode", chip), spec_facts(kivi(), chip)
    default = space.default(chip, facts)
    idle = ignored(backend("sm_90"), "decode", kivi(), place(kivi()), chip, default)
    assert set(idle) == {"ids", "fold_rows"}
    fixed = {knob: default[knob] for knob in idle}
    found = list(space.candidates(facts, fixed))
    assert 0 < len(found) < len(list(space.candidates(facts)))
    assert all(schedule[knob] == value for schedule in found for knob, value in fixed.items())
