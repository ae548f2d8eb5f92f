"""layout = "fast": the target chooses the axes, and nothing is placed before it has."""

from __future__ import annotations

import pytest

from kvgen.errors import ArgumentError, SpecError
from kvgen.ir import Spec
from kvgen.ir.codec import CODECS
from kvgen.ir.verify import verify_record
from kvgen.passes.place import place
from kvgen.passes.preset import CPU_FAST, resolve
from kvgen.passes.validate import load_spec
from kvgen.resolve import resolve_target


def fast(fmt: str, page_size: int = 16, **k: object) -> Spec:
    side = {"format": fmt, **CODECS[fmt].example}
    cache = {"page_size": page_size, "layout": "fast", "k": side | k, "v": side}
    return load_spec({"attention": {"q_heads": 8, "kv_heads": 2, "head_dim": 64}, "cache": cache})


def test_every_format_with_operands_of_its_own_has_a_fast_layout() -> None:
    assert set(CPU_FAST) == {name for name, codec in CODECS.items() if codec.fast}


@pytest.mark.parametrize("fmt", CODECS)
@pytest.mark.parametrize("page_size", [5, 16, 128])
@pytest.mark.parametrize("target", ["cpu", "cpu-portable", "sm_90", "gfx942", "interpret"])
def test_a_resolved_spec_is_a_plain_one(fmt: str, page_size: int, target: str) -> None:
    spec = resolve(fast(fmt, page_size), resolve_target(target))
    assert spec.cache.preset is None
    assert load_spec(spec.to_dict()) == spec
    verify_record(spec, place(spec))
    rows = not target.startswith("cpu") or page_size == 5 or not spec.direct("k")
    layouts = tuple(str(spec.cache.axes(side)[1][0].dim) for side in "kv")
    assert layouts == ("head", "head")
    assert not rows or (spec.cache.k.layout, spec.cache.v.layout) == (None, None)


def test_its_name_is_part_of_the_identity_until_then() -> None:
    spec = fast("int8")
    assert spec.to_dict()["cache"]["layout"] == "fast"
    assert Spec.from_dict(spec.to_dict()) == spec
    plain = load_spec(spec.to_dict() | {"cache": spec.to_dict()["cache"] | {"layout": "page kv head tok d"}})
    assert spec.hash != plain.hash
    on_gpu = resolve(spec, resolve_target("sm_90"))
    assert on_gpu.hash == plain.hash
    assert resolve(plain, resolve_target("cpu")) is plain


def test_nothing_is_placed_before_the_target_is_known() -> None:
    with pytest.raises(ValueError, match="depends on the target"):
        place(fast("int8"))


def test_a_side_cannot_have_axes_of_its_own() -> None:
    with pytest.raises(SpecError, match="chooses the axes of both sides"):
        fast("int8", layout="head tok d")


def test_an_export_for_two_kinds_of_target_needs_the_layout_written_out(tmp_path: object) -> None:
    from kvgen.export.package import export

    with pytest.raises(ArgumentError, match="another one for sm_90 than for cpu-portable"):
        export(fast("int8"), f"{tmp_path}/out", targets=["cpu-portable", "sm_90"])
