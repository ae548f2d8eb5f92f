"""What a binary is rejected for."""

from __future__ import annotations

import copy

import pytest

from kvgen.errors import ToolchainError
from kvgen.passes.inspect import faults, verify_binary
from kvgen.passes.validate import load_spec
from tests.support.specs import make_spec

GOOD = {
    "decode_split": {
        "spill_bytes": 0,
        "spilled_registers": 0,
        "loop": {"narrow_loads": {}, "loads": {"LDGSTS.128": 16}},
    },
    "merge_splits": {"spill_bytes": 0, "spilled_registers": 0},
}


def broken(**changes) -> dict:
    """GOOD with one kernel's facts changed."""
    found = copy.deepcopy(GOOD)
    found["decode_split"] |= changes
    return found


def test_a_clean_binary_has_no_faults() -> None:
    assert faults("decode", GOOD) == ()
    verify_binary("decode", "sm_90", GOOD)


def test_spills_are_named_whichever_way_they_are_counted() -> None:
    for change, size in (({"spill_bytes": 24}, 24), ({"spilled_registers": 3}, 12)):
        with pytest.raises(ToolchainError, match=f"decode for sm_90: decode_split keeps {size} bytes"):
            verify_binary("decode", "sm_90", broken(**change))


def test_narrow_loads_count_where_keys_are_read() -> None:
    found = broken(loop={"narrow_loads": {"LDG.U8": 32}})
    assert faults("append", found) == ()
    with pytest.raises(ToolchainError, match=r"32 x LDG\.U8"):
        verify_binary("prefill", "sm_80", found)


@pytest.mark.parametrize("kind", ("bool", "bits"))
def test_masks_of_the_caller_may_be_read_byte_by_byte(kind: str) -> None:
    found = broken(loop={"narrow_loads": {"LDG.U8": 32}})
    raw = make_spec().to_dict()
    raw["attention"] |= {"causal": False, "bool_mask": kind}
    assert faults("prefill", found, load_spec(raw)) == ()
    assert faults("prefill", found, make_spec()) != ()


def test_cpu_kernels_report_neither() -> None:
    assert faults("decode", {"bytes": 40000, "requires": ["avx2"]}) == ()
