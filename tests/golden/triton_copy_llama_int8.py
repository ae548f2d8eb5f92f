"""copy: whole pages, plane by plane, from src to dst.

spec 24a5bc15, target sm_80
schedule: block=4096 num_warps=4

One program moves BLOCK elements of every plane of one pair. Padding between rows is not touched.
"""

import triton
import triton.language as tl

BLOCK = tl.constexpr(4096)  # stored elements of a plane that one program copies


@triton.jit
def copy(
    k_ptr,  # int8: k plane
    k_stride_page: tl.int64,  # elements
    k_scale_ptr,  # f32: k_scale plane
    k_scale_stride_page: tl.int64,  # elements
    v_ptr,  # int8: v plane
    v_stride_page: tl.int64,  # elements
    v_scale_ptr,  # f32: v_scale plane
    v_scale_stride_page: tl.int64,  # elements
    src_pages_ptr,  # i32: pages to read, N
    dst_pages_ptr,  # i32: pages to write, N
):
    pair = tl.program_id(0)
    src = tl.load(src_pages_ptr + pair).to(tl.int64)
    dst = tl.load(dst_pages_ptr + pair).to(tl.int64)
    e_E = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k_at_E = k_ptr + e_E
    k_E = tl.load(k_at_E + src * k_stride_page, mask=e_E < 16384)
    tl.store(k_at_E + dst * k_stride_page, k_E, mask=e_E < 16384)
    k_scale_at_E = k_scale_ptr + e_E
    k_scale_E = tl.load(k_scale_at_E + src * k_scale_stride_page, mask=e_E < 128)
    tl.store(k_scale_at_E + dst * k_scale_stride_page, k_scale_E, mask=e_E < 128)
    v_at_E = v_ptr + e_E
    v_E = tl.load(v_at_E + src * v_stride_page, mask=e_E < 16384)
    tl.store(v_at_E + dst * v_stride_page, v_E, mask=e_E < 16384)
    v_scale_at_E = v_scale_ptr + e_E
    v_scale_E = tl.load(v_scale_at_E + src * v_scale_stride_page, mask=e_E < 128)
    tl.store(v_scale_at_E + dst * v_scale_stride_page, v_scale_E, mask=e_E < 128)
