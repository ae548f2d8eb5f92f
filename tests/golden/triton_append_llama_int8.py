"""append: store new keys and values at their slots, quantised on the way.

spec 24a5bc15, target gfx942, bf16
schedule: num_warps=4 rows=16

One program stores ROWS rows (token, KV head). Only the bytes of its slots change; slot -1 is skipped.
"""

import triton
import triton.language as tl

KV_HEADS = tl.constexpr(8)  # KV heads
PAGE = tl.constexpr(16)  # tokens of a page
ROWS = tl.constexpr(16)  # rows (token, KV head) of a program
K_QMAX = tl.constexpr(127.0)  # largest code of K
V_QMAX = tl.constexpr(127.0)  # largest code of V
ZERO_AMAX = tl.constexpr(7.888609052210118e-31)  # 2**-100: a row below this is stored as zeros
K_STRIDE_HEAD = tl.constexpr(2048)  # elements from one head to the next
K_STRIDE_TOK = tl.constexpr(128)  # elements from one token to the next
K_SCALE_STRIDE_HEAD = tl.constexpr(16)  # elements from one head to the next
V_STRIDE_HEAD = tl.constexpr(2048)  # elements from one head to the next
V_STRIDE_TOK = tl.constexpr(128)  # elements from one token to the next
V_SCALE_STRIDE_HEAD = tl.constexpr(16)  # elements from one head to the next


@triton.jit
def to_code(x, QMAX: tl.constexpr):
    """f32 -> the nearest code of -QMAX to QMAX, ties to even, saturated."""
    x = tl.minimum(tl.maximum(x, -QMAX), QMAX)
    # 1.5 * 2**23: the sum keeps integers only and rounds to nearest even, exactly as rint does.
    return ((x + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def append(
    k_new_ptr,  # bf16: new keys, T x kv_heads x head_dim
    k_new_stride_tok: tl.int64,  # elements
    k_new_stride_head: tl.int64,  # elements
    v_new_ptr,  # bf16: new values, T x kv_heads x v_head_dim
    v_new_stride_tok: tl.int64,  # elements
    v_new_stride_head: tl.int64,  # elements
    slots_ptr,  # i64: page * page_size + offset, T; -1 skips the token
    num_tokens: tl.int32,  # tokens T
    k_ptr,  # int8: k plane
    k_stride_page: tl.int64,  # elements
    k_scale_ptr,  # f32: k_scale plane
    k_scale_stride_page: tl.int64,  # elements
    v_ptr,  # int8: v plane
    v_stride_page: tl.int64,  # elements
    v_scale_ptr,  # f32: v_scale plane
    v_scale_stride_page: tl.int64,  # elements
):
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token_R = row_R // KV_HEADS
    head_R = row_R % KV_HEADS
    slot_R = tl.load(slots_ptr + token_R, mask=token_R < num_tokens, other=-1)
    live_R = slot_R >= 0
    page_R = slot_R // PAGE
    tok_R = slot_R % PAGE

    k_new_R = k_new_ptr + token_R * k_new_stride_tok + head_R * k_new_stride_head
    k_row_R = k_ptr + page_R.to(tl.int64) * k_stride_page + head_R * K_STRIDE_HEAD + tok_R * K_STRIDE_TOK
    k_d_D = tl.arange(0, 128)
    k_mask = live_R[:, None]
    k_RD = tl.load(k_new_R[:, None] + k_d_D[None, :], mask=k_mask, other=0.0).to(tl.float32)
    # The magnitude as an integer orders finite < inf < NaN, so one maximum finds both amax and bad rows.
    k_bits_R = tl.max(k_RD.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    k_bad_R = k_bits_R >= 0x7F800000
    k_amax_R = k_bits_R.to(tl.float32, bitcast=True)
    k_kept_R = (k_amax_R >= ZERO_AMAX) & (k_bits_R < 0x7F800000)
    # IEEE divisions: the bytes are the same on every machine.
    k_step_R = tl.div_rn(tl.where(k_kept_R, k_amax_R, 1.0), K_QMAX)
    k_inv_R = tl.div_rn(1.0, k_step_R)
    k_RD = tl.where(k_kept_R[:, None], k_RD, 0.0) * k_inv_R[:, None]
    # A row with NaN or inf reads back as NaN and spoils no other.
    k_scale_R = k_scale_ptr + page_R.to(tl.int64) * k_scale_stride_page + head_R * K_SCALE_STRIDE_HEAD + tok_R
    k_step_R = tl.where(k_bad_R, float("nan"), tl.where(k_kept_R, k_step_R, 0.0))
    tl.store(k_scale_R, k_step_R, mask=live_R)
    tl.store(k_row_R[:, None] + k_d_D[None, :], to_code(k_RD, K_QMAX), mask=k_mask)

    v_new_R = v_new_ptr + token_R * v_new_stride_tok + head_R * v_new_stride_head
    v_row_R = v_ptr + page_R.to(tl.int64) * v_stride_page + head_R * V_STRIDE_HEAD + tok_R * V_STRIDE_TOK
    v_d_D = tl.arange(0, 128)
    v_mask = live_R[:, None]
    v_RD = tl.load(v_new_R[:, None] + v_d_D[None, :], mask=v_mask, other=0.0).to(tl.float32)
    # The magnitude as an integer orders finite < inf < NaN, so one maximum finds both amax and bad rows.
    v_bits_R = tl.max(v_RD.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    v_bad_R = v_bits_R >= 0x7F800000
    v_amax_R = v_bits_R.to(tl.float32, bitcast=True)
    v_kept_R = (v_amax_R >= ZERO_AMAX) & (v_bits_R < 0x7F800000)
    # IEEE divisions: the bytes are the same on every machine.
    v_step_R = tl.div_rn(tl.where(v_kept_R, v_amax_R, 1.0), V_QMAX)
    v_inv_R = tl.div_rn(1.0, v_step_R)
    v_RD = tl.where(v_kept_R[:, None], v_RD, 0.0) * v_inv_R[:, None]
    # A row with NaN or inf reads back as NaN and spoils no other.
    v_scale_R = v_scale_ptr + page_R.to(tl.int64) * v_scale_stride_page + head_R * V_SCALE_STRIDE_HEAD + tok_R
    v_step_R = tl.where(v_bad_R, float("nan"), tl.where(v_kept_R, v_step_R, 0.0))
    tl.store(v_scale_R, v_step_R, mask=live_R)
    tl.store(v_row_R[:, None] + v_d_D[None, :], to_code(v_RD, V_QMAX), mask=v_mask)
