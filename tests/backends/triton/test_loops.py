"""Loops found in small pieces of machine code, one rule at a time."""

from __future__ import annotations

from kvgen.backends.triton import amdgcn, sass
from kvgen.backends.triton.loops import Loop, find_loops, instr_per_token

KERNEL = "\t\tFunction : paged\n"


def sass_loops(*lines: str) -> tuple[Loop, ...]:
    text = KERNEL + "\n".join(
        f"        /*{16 * i:04x}*/   {line} ;    /* 0x00 */" for i, line in enumerate(lines)
    )
    return find_loops(sass.parse(text, "paged"))


def test_backward_branch_makes_a_loop_and_nops_do_not_count() -> None:
    (loop,) = sass_loops(
        "IADD3 R0, R0, 0x1, RZ", "HMMA.16816.F32.BF16 R4, R8, R12, R4", "NOP", "MUFU.EX2 R1, R2",
        "BAR.SYNC.DEFER_BLOCKING 0x0", "@!P0 BRA 0x10", "EXIT", "BRA 0x70", "NOP",
    )  # fmt: skip
    assert (loop.start, loop.end) == (0x10, 0x50)
    assert loop.instructions == 4
    assert loop.mma == {"HMMA": 1}
    assert (loop.mufu, loop.barriers) == (1, 1)
    assert loop.opcodes == {"BAR": 1, "BRA": 1, "HMMA": 1, "MUFU": 1}
    assert instr_per_token(loop, warps=4, tokens=64) == 0.25


def test_range_with_exit_is_out_of_line_code() -> None:
    assert sass_loops("LDG.E R0, [R2.64]", "IADD3 R0, R0, 0x1, RZ", "EXIT", "NOP", "BRA 0x10") == ()


def test_sm80_loop_ends_in_an_exit_jump() -> None:
    (loop,) = sass_loops(
        "LDG.E R0, [R2.64]", "@P0 CALL.REL.NOINC 0x30", "BRA 0x0", "BRA 0x40", "EXIT", "BRA 0x50"
    )
    assert loop.instructions == 3


def test_uniform_branch_is_read() -> None:
    (loop,) = sass_loops("LDG.E R0, [R2.64]", "BRA.U !UP0, 0x0", "EXIT")
    assert loop.end == 0x10


def test_widths_of_memory_accesses() -> None:
    (loop,) = sass_loops(
        "LDGSTS.E.BYPASS.LTC128B.128 [R1], desc[UR4][R2.64]", "LDGSTS.E.LTC128B.64 [R1], desc[UR4][R2.64]",
        "LDG.E.U8 R1, desc[UR4][R2.64]", "LDG.E.S16.CONSTANT R1, [R2.64]", "@P1 LDG.E R1, [R2.64]",
        "LDG.E.ENL2.256 R8, R4, desc[UR4][R2.64]", "STG.E.128 [R2.64], R4", "LDS.U.128 R4, [R2]",
        "LDSM.16.MT88.4 R4, [R2]", "STS.U16 [R2], R4", "@!PT LDS RZ, [RZ]", "UTMALDG.2D [UR8], [UR4]",
        "LDL.64 R2, [R1]", "STL [R1], R2", "BRA 0x0",
    )  # fmt: skip
    assert loop.global_loads == {
        "LDG.256": 1, "LDG.32": 1, "LDG.S16": 1, "LDG.U8": 1, "LDGSTS.128": 1, "LDGSTS.64": 1,
    }  # fmt: skip
    assert loop.narrow_loads == {"LDG.S16": 1, "LDG.U8": 1}
    assert loop.load_bits == 256 + 32 + 16 + 8 + 128 + 64
    assert loop.async_copies == 3
    assert loop.tma_loads == 1
    assert loop.global_stores == {"STG.128": 1}
    assert loop.shared_loads == {"LDS.128": 1, "LDSM.MT88.4": 1}  # the load that never runs moves nothing
    assert loop.opcodes["LDS"] == 2  # but costs a slot
    assert loop.shared_stores == {"STS.U16": 1}
    assert (loop.local_loads, loop.local_stores) == (1, 1)


def test_nesting_and_waiting() -> None:
    outer, inner = sass_loops(
        "IADD3 R0, R0, 0x1, RZ", "LDG.E R0, [R2.64]", "@P0 BRA 0x10",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R1", "@!P0 BRA 0x30", "@P1 BRA 0x0", "EXIT",
    )  # fmt: skip
    assert not outer.innermost
    assert inner.innermost
    assert inner.start == 0x10


def test_every_matrix_unit_counts() -> None:
    (loop,) = sass_loops(
        "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24", "IMMA.16832.S8.S8 R4, R8, R12, R4",
        "QGMMA.64x8x32.F32.E4M3.E4M3 R4, gdesc[UR4], R4", "UTCHMMA gdesc[UR4], gdesc[UR8], tmem[UR12]",
        "DMMA.884 R4, R8, R12, R4", "HFMA2.MMA R4, R8, R12, R4", "BRA 0x0",
    )  # fmt: skip
    assert loop.mma == {"DMMA": 1, "HGMMA": 1, "IMMA": 1, "QGMMA": 1, "UTCHMMA": 1}


def test_amdgcn() -> None:
    text = """
paged:                                  ; @paged
; %bb.0:
	s_load_dwordx2 s[2:3], s[0:1], 0x0
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
	global_load_dwordx4 v[4:7], v[2:3], off
	global_load_ubyte v9, v[2:3], off offset:16
	buffer_load_dword v8, s[4:7], 0 offen lds
	s_nop 4
	v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]
	v_exp_f32_e32 v1, v2
	ds_read2_b64 v[4:7], v1 offset1:1
	ds_write_b128 v1, v[4:7]
	scratch_load_dwordx2 v[4:5], off, off offset:8 ; 8-byte Folded Reload
	s_barrier
	s_cbranch_scc1 .LBB0_1
; %bb.2:
	global_store_short v[2:3], v1, off
	s_endpgm
.Lfunc_end0:
	s_branch .LBB0_1
"""
    code = amdgcn.parse(text, "paged")
    (loop,) = find_loops(code)
    assert len(code) == 14
    assert loop.instructions == 10
    assert loop.global_loads == {"buffer_load_dword": 1, "global_load_dwordx4": 1, "global_load_ubyte": 1}
    assert loop.narrow_loads == {"global_load_ubyte": 1}
    assert loop.load_bits == 128 + 8 + 32
    assert loop.async_copies == 1
    assert loop.mma == {"v_mfma_f32_16x16x16_bf16": 1}
    assert (loop.mufu, loop.barriers, loop.local_loads) == (1, 1, 1)
    assert loop.shared_loads == {"ds_read2_b64": 1}
    assert loop.shared_stores == {"ds_write_b128": 1}
