"""gather: the keys and values of each request, contiguous and dequantised to f32.

spec 1ade912c, target sm_100, f32
schedule: num_warps=4 tile=32

One program reads one tile of one request's tokens of one KV head. Table entries past the last page are not read.
"""

import triton
import triton.language as tl

PAGE = tl.constexpr(64)  # tokens of a page
TILE = tl.constexpr(32)  # tokens of a program
K_STRIDE_HEAD = tl.constexpr(6144)  # elements from one head to the next
K_STRIDE_D_OUTER = tl.constexpr(512)  # elements from one block of 8 elements of d to the next
K_STRIDE_TOK = tl.constexpr(8)  # elements from one token to the next
V_STRIDE_HEAD = tl.constexpr(6144)  # elements from one head to the next
V_STRIDE_TOK = tl.constexpr(96)  # elements from one token to the next


@triton.jit
def gather(
    k_ptr,  # bf16: k plane
    k_stride_page: tl.int64,  # elements
    v_ptr,  # f32: v plane
    v_stride_page: tl.int64,  # elements
    page_table_ptr,  # i32: page ids, B x P
    table_stride: tl.int64,  # elements from one request's row to the next
    kv_lens_ptr,  # i32: keys of each request, B
    kv_starts_ptr,  # i64: first output row of each request, B
    k_out_ptr,  # f32: keys, T x kv_heads x head_dim
    k_out_stride_tok: tl.int64,  # elements
    k_out_stride_head: tl.int64,  # elements
    v_out_ptr,  # f32: values, T x kv_heads x v_head_dim
    v_out_stride_tok: tl.int64,  # elements
    v_out_stride_head: tl.int64,  # elements
):
    tile = tl.program_id(0) * TILE
    head = tl.program_id(1)
    b = tl.program_id(2)
    kv_len = tl.load(kv_lens_ptr + b)
    if tile >= kv_len:
        return
    key_T = tile + tl.arange(0, TILE)
    seen_T = key_T < kv_len
    page_T = tl.load(page_table_ptr + b.to(tl.int64) * table_stride + key_T // PAGE, mask=seen_T, other=0)
    tok_T = key_T % PAGE
    row_T = tl.load(kv_starts_ptr + b) + key_T

    k_row_T = k_ptr + page_T.to(tl.int64) * k_stride_page + head * K_STRIDE_HEAD + tok_T * K_STRIDE_TOK
    k_out_T = k_out_ptr + row_T * k_out_stride_tok + head * k_out_stride_head
    k_d0_D = tl.arange(0, 64)
    k0_mask = seen_T[:, None]
    k0_TD = tl.load(k_row_T[:, None] + (k_d0_D[None, :] // 8) * K_STRIDE_D_OUTER + (k_d0_D[None, :] % 8), mask=k0_mask, other=0).to(tl.float32)
    tl.store(k_out_T[:, None] + k_d0_D[None, :], k0_TD, mask=k0_mask)
    k_d1_D = 64 + tl.arange(0, 32)
    k1_mask = seen_T[:, None]
    k1_TD = tl.load(k_row_T[:, None] + (k_d1_D[None, :] // 8) * K_STRIDE_D_OUTER + (k_d1_D[None, :] % 8), mask=k1_mask, other=0).to(tl.float32)
    tl.store(k_out_T[:, None] + k_d1_D[None, :], k1_TD, mask=k1_mask)

    v_row_T = v_ptr + page_T.to(tl.int64) * v_stride_page + head * V_STRIDE_HEAD + tok_T * V_STRIDE_TOK
    v_out_T = v_out_ptr + row_T * v_out_stride_tok + head * v_out_stride_head
    v_d0_D = tl.arange(0, 64)
    v0_mask = seen_T[:, None]
    v0_TD = tl.load(v_row_T[:, None] + v_d0_D[None, :], mask=v0_mask, other=0)
    tl.store(v_out_T[:, None] + v_d0_D[None, :], v0_TD, mask=v0_mask)
    v_d1_D = 64 + tl.arange(0, 32)
    v1_mask = seen_T[:, None]
    v1_TD = tl.load(v_row_T[:, None] + v_d1_D[None, :], mask=v1_mask, other=0)
    tl.store(v_out_T[:, None] + v_d1_D[None, :], v1_TD, mask=v1_mask)
