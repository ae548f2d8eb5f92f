"""ISA rows: detection, flags, and the promise that no unchecked instruction can be emitted or run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvgen.backends.cpu import isa
from kvgen.backends.cpu.compiler import find_compiler
from kvgen.backends.cpu.process import invoke
from kvgen.errors import ArgumentError, UnsupportedError

X86 = pytest.mark.skipif(isa.machine() != "x86_64", reason="x86-64 flags")

# Macros the compiler defines for each extension beyond the x86-64 baseline, and the feature that vouches for
# each.
MACROS = {
    "__SSE3__": "avx2",
    "__SSSE3__": "avx2",
    "__SSE4_1__": "avx2",
    "__SSE4_2__": "avx2",
    "__AVX__": "avx2",
    "__AVX2__": "avx2",
    "__POPCNT__": "avx2",
    "__CRC32__": "avx2",
    "__XSAVE__": "avx2",
    "__FMA__": "fma",
    "__F16C__": "f16c",
    "__BMI2__": "bmi2",
    "__AVX512F__": "avx512f",
    "__EVEX512__": "avx512f",
    "__EVEX256__": "avx512f",
    "__AVX512BW__": "avx512bw",
    "__AVX512DQ__": "avx512dq",
    "__AVX512VL__": "avx512vl",
    "__AVX512BF16__": "bf16",
    "__AVX512VNNI__": "vnni",
    "__AVX512VBMI__": "vbmi",
}


def defined(flags: tuple[str, ...], folder: Path) -> set[str]:
    (folder / "empty.cpp").write_text("")
    done = invoke((*find_compiler().command, *flags, "-dM", "-E", "empty.cpp"), cwd=folder, timeout_s=30)
    assert done.returncode == 0, done.output
    return set(re.findall(r"#define (__\w+__) 1$", done.output, re.M))


@X86
@pytest.mark.parametrize("name", ["avx512", "avx2", "portable"])
def test_a_row_enables_exactly_what_is_checked_before_loading(name: str, tmp_path: Path) -> None:
    row = isa.ROWS[name]
    flags = isa.flags_for(row, row.optional)
    required = set(isa.required_by(flags))
    assert required == {*row.required, *row.optional}
    enabled = defined(flags, tmp_path) - defined((), tmp_path)
    vector = {
        m for m in enabled if re.match(r"__(SSE|SSSE|AVX|FMA|F16C|BMI|LZCNT|POPCNT|CRC32|GFNI|VAES|EVEX)", m)
    }
    assert {MACROS[macro] for macro in vector} == required  # an unknown macro is a KeyError: look at it


def test_optional_features_add_their_flag_only_when_asked() -> None:
    bare, rich = (isa.flags_for("avx512", f, arch="x86_64") for f in ((), ("vnni", "bf16")))
    assert "-mavx512bf16" not in bare
    assert "-mavx512vnni" not in bare
    assert [f for f in rich if f not in bare] == [
        "-mavx512bf16",
        "-mavx512vnni",
    ]  # the row's order, not the caller's


@pytest.mark.parametrize(
    ("name", "features", "arch", "message"),
    [
        ("sse9", (), "x86_64", "no such row; use avx512, avx2, portable"),
        ("avx2", ("bf16",), "x86_64", "whose optional features are: none"),
        ("avx512", ("amx",), "x86_64", "bf16, vnni, vbmi"),
        ("avx512", (), "aarch64", "an x86-64 row"),
    ],
)
def test_rows_that_cannot_be_are_refused(
    name: str, features: tuple[str, ...], arch: str, message: str
) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        isa.flags_for(name, features, arch=arch)


def test_portable_on_aarch64_needs_no_flag() -> None:
    assert isa.flags_for("portable", arch="aarch64") == ()


@pytest.mark.parametrize(
    "flag", ["-march=native", "-mcpu=native", "-mtune=native", "-march=znver4", "-mamx-tile"]
)
def test_flags_that_cannot_be_checked_are_refused(flag: str) -> None:
    with pytest.raises(ArgumentError, match="cannot be checked"):
        isa.required_by(["-O3", flag])


def test_flags_that_add_no_instructions_pass() -> None:
    assert isa.required_by(["-O3", "-mprefer-vector-width=512", "-mno-avx", "-m64", "-DX=1"]) == ()


def test_a_feature_counts_only_when_all_cores_have_it() -> None:
    full = "flags\t\t: fpu avx2 fma f16c bmi2 avx512f avx512bw avx512dq avx512vl avx512_vnni\n"
    small = "flags\t\t: fpu avx2 fma f16c bmi2\n"
    assert isa.best_row(isa.parse_cpuinfo(full)).name == "avx512"
    assert isa.parse_cpuinfo(full) >= {"vnni", "avx512vl"}
    assert isa.best_row(isa.parse_cpuinfo(full + small)).name == "avx2"
    assert isa.best_row(isa.parse_cpuinfo("flags : fpu sse2\n")).name == "portable"
    assert isa.parse_cpuinfo("Features : asimd\n") == frozenset()


@pytest.mark.parametrize("missing", isa.ROWS["avx512"].required)
def test_each_required_feature_is_required(missing: str) -> None:
    assert isa.best_row(set(isa.ROWS["avx512"].required) - {missing}).name != "avx512"


def test_target_names() -> None:
    assert isa.resolve_target("cpu") == isa.best_row()
    for row in isa.ROWS.values():
        assert isa.resolve_target(row.target) is row
    for wrong in ("cuda", "avx512", "cpu-", "cpu-sse", "sm_90"):
        with pytest.raises(UnsupportedError, match="cpu-avx512, cpu-avx2, cpu-portable"):
            isa.resolve_target(wrong)


def test_code_for_another_cpu_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "cpu_features", lambda: frozenset(isa.ROWS["avx2"].required))
    monkeypatch.setattr(isa, "machine", lambda: "x86_64")
    isa.check_runnable(["avx2", "fma"], what="kernel.so")
    with pytest.raises(UnsupportedError, match=r"kernel.so: needs avx512f, bf16, .*cpu-avx2"):
        isa.check_runnable(["avx2", "avx512f", "bf16"], what="kernel.so")
    with pytest.raises(UnsupportedError, match="built for aarch64, and this machine is x86_64"):
        isa.check_runnable([], what="kernel.so", arch="aarch64")
    assert isa.default_features(isa.ROWS["avx512"]) == ()


@pytest.mark.isa("avx512")
def test_this_cpu_is_seen() -> None:
    """The marker reads /proc/cpuinfo on its own, so a fault in our detection cannot skip this."""
    assert isa.best_row().name == "avx512"
