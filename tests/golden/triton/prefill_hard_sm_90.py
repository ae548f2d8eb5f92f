"""prefill: attention of ragged queries over a paged cache.

spec 71e2bbf1 (int8-head-f16-packed-k-5-4x7-72-True-33-f16), target sm_90
schedule: ids=inline num_stages=2 num_warps=8 rows=64 tile=64

28 query heads over 4 KV heads of 72 elements (causal, aligned to the last key, window of 33 earlier keys).
q f16, K int8, V f16.
Pages of 5 tokens laid out 'page kv head tok d'.
One program attends with one tile of a request's query rows to all keys they see.
"""

import triton
import triton.language as tl

DIGIT = tl.constexpr(254)  # low digits per high digit of q
GROUP = tl.constexpr(7)  # query heads that share one KV head
KV_HEADS = tl.constexpr(4)  # KV heads
ROWS = tl.constexpr(64)  # query rows of a tile: (token, head of the group) packed
TILE = tl.constexpr(64)  # keys of a tile
PAGE = tl.constexpr(5)  # tokens of a page
WINDOW = tl.constexpr(33)  # earlier keys a query sees beside its own
V_HEAD_DIM = tl.constexpr(72)  # elements of an output row
K_STRIDE_HEAD = tl.constexpr(360)  # elements from one head index to the next
K_STRIDE_D_OUTER = tl.constexpr(40)  # elements from one d index to the next
K_STRIDE_TOK = tl.constexpr(8)  # elements from one tok index to the next
V_STRIDE_HEAD = tl.constexpr(480)  # elements from one head index to the next
V_STRIDE_TOK = tl.constexpr(96)  # elements from one tok index to the next
@triton.jit
def to_digits(x):
    """f32 in [-127, 127] -> int8 high and low with x = high + low / DIGIT, each rounded to nearest."""
    # 1.5 * 2**23 + x keeps only x's integer part: a rounding without a conversion.
    high = (x + 12582912.0) - 12582912.0
    low = ((x - high) * DIGIT + 12582912.0) - 12582912.0
    return high.to(tl.int8), low.to(tl.int8)


@triton.jit
def is_wild(x):
    """Where x is NaN or infinite."""
    return ~(tl.abs(x.to(tl.float32)) < float("inf"))


@triton.jit
def count_wild(visible_MT, v_TW):
    """How many NaN, +inf and -inf of V each output would meet: a byte each, as a tile has fewer than 256 keys."""
    kind_TW = tl.where(v_TW != v_TW, 1.0, tl.where(v_TW == float("inf"), 256.0, 65536.0))
    kind_TW = tl.where(is_wild(v_TW), kind_TW, 0.0)
    return tl.dot(visible_MT.to(tl.float32), kind_TW, input_precision="tf32").to(tl.int32)


@triton.jit
def add_wild(out_MW, count_MW):
    """out plus the NaN and infinities that were counted."""
    out_MW += tl.where((count_MW & 0xFF) > 0, float("nan"), 0.0)
    out_MW += tl.where((count_MW & 0xFF00) > 0, float("inf"), 0.0)
    return out_MW + tl.where(count_MW > 0xFFFF, float("-inf"), 0.0)


@triton.jit
def prefill(
    q_ptr,  # f16: queries, T x q_heads x head_dim
    q_stride_tok: tl.int64,  # elements
    q_stride_head: tl.int64,  # elements
    q_starts_ptr,  # i32: first query row of each request, B+1
    k_ptr,  # int8: k plane
    k_stride_page: tl.int64,  # elements
    v_ptr,  # f16: v plane
    v_stride_page: tl.int64,  # elements
    k_scale_ptr,  # f32: one scale per KV head
    page_table_ptr,  # i32: page ids, B x P
    table_stride: tl.int64,  # elements from one request's row to the next
    kv_lens_ptr,  # i32: keys of each request, B
    out_ptr,  # f16: outputs, T x q_heads x v_head_dim
    out_stride_tok: tl.int64,  # elements
    out_stride_head: tl.int64,  # elements
    lse_ptr,  # f32: base-2 logsumexp, T x q_heads
    lse_stride_tok: tl.int64,  # elements
    score_scale: tl.float32,  # attention scale times log2(e)
):
    row_tile = tl.program_id(0)
    head = tl.program_id(1)
    b = tl.program_id(2)

    kv_len = tl.load(kv_lens_ptr + b)
    q_first = tl.load(q_starts_ptr + b)
    q_len = tl.load(q_starts_ptr + b + 1) - q_first
    if row_tile * ROWS >= q_len * GROUP:
        return
    row_M = row_tile * ROWS + tl.arange(0, ROWS)
    token_M = row_M // GROUP  # query of the request
    head_M = head * GROUP + row_M % GROUP
    live_M = token_M < q_len
    # Bottom-right alignment: the last query sits on the last key.
    pos_M = kv_len - q_len + token_M
    first_pos = kv_len - q_len + row_tile * ROWS // GROUP
    last_pos = kv_len - q_len + tl.minimum(q_len, (row_tile * ROWS + ROWS - 1) // GROUP + 1) - 1

    # The keys [kv_lo, kv_hi) that some row of the tile sees; no other page is looked up.
    kv_lo = tl.maximum(first_pos - WINDOW, 0)
    kv_hi = tl.maximum(last_pos + 1, 0)
    # Tiles inside [body_lo, body_hi) are seen by every row and need no mask.
    full_lo = tl.maximum(last_pos - WINDOW, 0)
    body_lo = tl.minimum(tl.cdiv(full_lo, TILE), tl.cdiv(kv_hi, TILE)) * TILE
    body_hi = tl.maximum(tl.minimum(tl.maximum(first_pos + 1, 0), kv_hi) // TILE * TILE, body_lo)
    table_row = page_table_ptr + b.to(tl.int64) * table_stride
    table_end = tl.cdiv(kv_hi, PAGE)  # columns from here on may hold anything

    tok_T = tl.arange(0, TILE)
    k_d0_D = tl.arange(0, 64)
    k_d1_D = 64 + tl.arange(0, 32)
    v_d0_D = tl.arange(0, 64)
    v_d1_D = 64 + tl.arange(0, 16)
    k_head0_D = k_ptr + head * K_STRIDE_HEAD + (k_d0_D // 8) * K_STRIDE_D_OUTER + (k_d0_D % 8)
    k_head1_D = k_ptr + head * K_STRIDE_HEAD + (k_d1_D // 8) * K_STRIDE_D_OUTER + (k_d1_D % 8)
    v_head0_D = v_ptr + head * V_STRIDE_HEAD + v_d0_D
    v_head1_D = v_ptr + head * V_STRIDE_HEAD + v_d1_D

    q_row_M = q_ptr + (q_first + token_M) * q_stride_tok + head_M * q_stride_head
    q0_MD = tl.load(q_row_M[:, None] + k_d0_D[None, :], mask=live_M[:, None], other=0.0).to(tl.float32)
    q1_MD = tl.load(q_row_M[:, None] + k_d1_D[None, :], mask=live_M[:, None] & (k_d1_D < 72)[None, :], other=0.0).to(tl.float32)
    # Two int8 digits of q for each row. As integers, magnitudes order finite < inf < NaN.
    q0_bits_M = tl.max(q0_MD.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    q1_bits_M = tl.max(q1_MD.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    q0_bits_M = tl.maximum(q0_bits_M, q1_bits_M)
    q_amax_M = q0_bits_M.to(tl.float32, bitcast=True)
    q_inv_M = tl.where(q_amax_M > 2.0**-100, 127.0 / q_amax_M, 0.0)
    q_unit_M = tl.where(q0_bits_M < 0x7F800000, q_amax_M / (127.0 * DIGIT), float("nan"))
    q0_high_MD, q0_low_MD = to_digits(q0_MD * q_inv_M[:, None])
    q1_high_MD, q1_low_MD = to_digits(q1_MD * q_inv_M[:, None])
    score_scale *= tl.load(k_scale_ptr + head)
    score_M = q_unit_M * score_scale

    # True -inf: a very negative logit is a legal value, so no finite number can stand for "no key yet".
    m_M = tl.full([ROWS], float("-inf"), tl.float32)
    l_M = tl.zeros([ROWS], tl.float32)
    acc0_MD = tl.zeros([ROWS, 64], tl.float32)
    acc1_MD = tl.zeros([ROWS, 16], tl.float32)
    wild = 0

    # Tiles that the window's lower edge cuts.
    for tile in tl.range(kv_lo // TILE * TILE, body_lo, TILE, num_stages=1):
        column = (tile + tok_T) // PAGE
        ids_T = tl.load(table_row + column, mask=(column >= kv_lo // PAGE) & (column < table_end), other=0)
        slot_T = (tile + tok_T) % PAGE
        key_T = tile + tok_T
        seen_T = (key_T >= kv_lo) & (key_T < kv_hi)
        visible_MT = seen_T[None, :] & (key_T[None, :] <= pos_M[:, None]) & (key_T[None, :] >= pos_M[:, None] - WINDOW)
        k_at_T = ids_T.to(tl.int64) * k_stride_page + slot_T * K_STRIDE_TOK
        k0_TD = tl.load(k_head0_D[None, :] + k_at_T[:, None], mask=seen_T[:, None], other=0)
        k1_TD = tl.load(k_head1_D[None, :] + k_at_T[:, None], mask=seen_T[:, None] & (k_d1_D < 72)[None, :], other=0)
        k0_DT = tl.trans(k0_TD)
        high_MT = tl.dot(q0_high_MD, k0_DT, out_dtype=tl.int32)
        low_MT = tl.dot(q0_low_MD, k0_DT, out_dtype=tl.int32)
        k1_DT = tl.trans(k1_TD)
        high_MT = tl.dot(q1_high_MD, k1_DT, high_MT, out_dtype=tl.int32)
        low_MT = tl.dot(q1_low_MD, k1_DT, low_MT, out_dtype=tl.int32)
        s_MT = (high_MT * DIGIT + low_MT).to(tl.float32)
        s_MT = tl.where(visible_MT, s_MT, float("-inf"))
        m_next = tl.maximum(m_M, tl.max(s_MT, 1) * score_M)
        m_safe = tl.where(m_next == float("-inf"), 0.0, m_next)
        p_MT = tl.exp2(s_MT * score_M[:, None] - m_safe[:, None])
        alpha_M = tl.exp2(m_M - m_safe)
        m_M = m_next
        l_M = l_M * alpha_M + tl.sum(p_MT, 1)
        v_at_T = ids_T.to(tl.int64) * v_stride_page + slot_T * V_STRIDE_TOK
        v0_TD = tl.load(v_head0_D[None, :] + v_at_T[:, None], mask=seen_T[:, None], other=0)
        v1_TD = tl.load(v_head1_D[None, :] + v_at_T[:, None], mask=seen_T[:, None] & (v_d1_D < 72)[None, :], other=0)
        w_MT = p_MT.to(tl.float16)
        wild = tl.maximum(wild, tl.max(is_wild(v0_TD).to(tl.int32)))
        v0_TD = tl.where(is_wild(v0_TD), 0.0, v0_TD)
        acc0_MD = tl.dot(w_MT, v0_TD, acc0_MD * alpha_M[:, None])
        wild = tl.maximum(wild, tl.max(is_wild(v1_TD).to(tl.int32)))
        v1_TD = tl.where(is_wild(v1_TD), 0.0, v1_TD)
        acc1_MD = tl.dot(w_MT, v1_TD, acc1_MD * alpha_M[:, None])

    # Full tiles, seen by every row: no masks.
    for tile in tl.range(body_lo, body_hi, TILE):
        ids_T = tl.load(table_row + (tile + tok_T) // PAGE)
        slot_T = (tile + tok_T) % PAGE
        k_at_T = ids_T.to(tl.int64) * k_stride_page + slot_T * K_STRIDE_TOK
        k0_TD = tl.load(k_head0_D[None, :] + k_at_T[:, None])
        k1_TD = tl.load(k_head1_D[None, :] + k_at_T[:, None], mask=(k_d1_D < 72)[None, :], other=0)
        k0_DT = tl.trans(k0_TD)
        high_MT = tl.dot(q0_high_MD, k0_DT, out_dtype=tl.int32)
        low_MT = tl.dot(q0_low_MD, k0_DT, out_dtype=tl.int32)
        k1_DT = tl.trans(k1_TD)
        high_MT = tl.dot(q1_high_MD, k1_DT, high_MT, out_dtype=tl.int32)
        low_MT = tl.dot(q1_low_MD, k1_DT, low_MT, out_dtype=tl.int32)
        s_MT = (high_MT * DIGIT + low_MT).to(tl.float32)
        # The scale is applied after the maximum: one multiply-add an element.
        m_next = tl.maximum(m_M, tl.max(s_MT, 1) * score_M)
        # A row without a key so far has m = -inf, and -inf - -inf is NaN: subtract 0 there.
        m_safe = tl.where(m_next == float("-inf"), 0.0, m_next)
        p_MT = tl.exp2(s_MT * score_M[:, None] - m_safe[:, None])
        alpha_M = tl.exp2(m_M - m_safe)
        m_M = m_next
        l_M = l_M * alpha_M + tl.sum(p_MT, 1)
        v_at_T = ids_T.to(tl.int64) * v_stride_page + slot_T * V_STRIDE_TOK
        v0_TD = tl.load(v_head0_D[None, :] + v_at_T[:, None])
        v1_TD = tl.load(v_head1_D[None, :] + v_at_T[:, None], mask=(v_d1_D < 72)[None, :], other=0)
        w_MT = p_MT.to(tl.float16)
        acc0_MD = tl.dot(w_MT, v0_TD, acc0_MD * alpha_M[:, None])
        acc1_MD = tl.dot(w_MT, v1_TD, acc1_MD * alpha_M[:, None])

    # The last tiles: past the end of the keys, or not seen by every row.
    for tile in tl.range(body_hi, kv_hi, TILE, num_stages=1):
        column = (tile + tok_T) // PAGE
        ids_T = tl.load(table_row + column, mask=(column >= kv_lo // PAGE) & (column < table_end), other=0)
        slot_T = (tile + tok_T) % PAGE
        key_T = tile + tok_T
        seen_T = (key_T >= kv_lo) & (key_T < kv_hi)
        visible_MT = seen_T[None, :] & (key_T[None, :] <= pos_M[:, None]) & (key_T[None, :] >= pos_M[:, None] - WINDOW)
        k_at_T = ids_T.to(tl.int64) * k_stride_page + slot_T * K_STRIDE_TOK
        k0_TD = tl.load(k_head0_D[None, :] + k_at_T[:, None], mask=seen_T[:, None], other=0)
        k1_TD = tl.load(k_head1_D[None, :] + k_at_T[:, None], mask=seen_T[:, None] & (k_d1_D < 72)[None, :], other=0)
        k0_DT = tl.trans(k0_TD)
        high_MT = tl.dot(q0_high_MD, k0_DT, out_dtype=tl.int32)
        low_MT = tl.dot(q0_low_MD, k0_DT, out_dtype=tl.int32)
        k1_DT = tl.trans(k1_TD)
        high_MT = tl.dot(q1_high_MD, k1_DT, high_MT, out_dtype=tl.int32)
        low_MT = tl.dot(q1_low_MD, k1_DT, low_MT, out_dtype=tl.int32)
        s_MT = (high_MT * DIGIT + low_MT).to(tl.float32)
        s_MT = tl.where(visible_MT, s_MT, float("-inf"))
        m_next = tl.maximum(m_M, tl.max(s_MT, 1) * score_M)
        m_safe = tl.where(m_next == float("-inf"), 0.0, m_next)
        p_MT = tl.exp2(s_MT * score_M[:, None] - m_safe[:, None])
        alpha_M = tl.exp2(m_M - m_safe)
        m_M = m_next
        l_M = l_M * alpha_M + tl.sum(p_MT, 1)
        v_at_T = ids_T.to(tl.int64) * v_stride_page + slot_T * V_STRIDE_TOK
        v0_TD = tl.load(v_head0_D[None, :] + v_at_T[:, None], mask=seen_T[:, None], other=0)
        v1_TD = tl.load(v_head1_D[None, :] + v_at_T[:, None], mask=seen_T[:, None] & (v_d1_D < 72)[None, :], other=0)
        w_MT = p_MT.to(tl.float16)
        wild = tl.maximum(wild, tl.max(is_wild(v0_TD).to(tl.int32)))
        v0_TD = tl.where(is_wild(v0_TD), 0.0, v0_TD)
        acc0_MD = tl.dot(w_MT, v0_TD, acc0_MD * alpha_M[:, None])
        wild = tl.maximum(wild, tl.max(is_wild(v1_TD).to(tl.int32)))
        v1_TD = tl.where(is_wild(v1_TD), 0.0, v1_TD)
        acc1_MD = tl.dot(w_MT, v1_TD, acc1_MD * alpha_M[:, None])

    # No key: out 0 and lse -inf, the empty state.
    lse_M = tl.where(l_M == 0.0, float("-inf"), m_M + tl.log2(l_M))
    gain_M = 1.0 / tl.where(l_M == 0.0, 1.0, l_M)
    out0_MD = tl.where(l_M[:, None] == 0.0, 0.0, acc0_MD * gain_M[:, None])
    out1_MD = tl.where(l_M[:, None] == 0.0, 0.0, acc1_MD * gain_M[:, None])
    tl.store(lse_ptr + (q_first + token_M) * lse_stride_tok + head_M, lse_M, mask=live_M)
    out_M = out_ptr + (q_first + token_M) * out_stride_tok + head_M * out_stride_head
    tl.store(
        out_M[:, None] + v_d0_D[None, :],
        out0_MD.to(tl.float16), mask=live_M[:, None],
    )
    tl.store(
        out_M[:, None] + v_d1_D[None, :],
        out1_MD.to(tl.float16), mask=live_M[:, None] & (v_d1_D < 72)[None, :],
    )

    # Rare: V holds NaN or infinities in a masked tile. Each must reach the rows that see its key and no other,
    # but 0 * NaN is NaN, so those tiles took zeros. What was left out is added to what is stored by now, a few
    # elements of d at a time: the loops above would pay for the registers of anything faster.
    if wild > 0:
        for tile in tl.range(kv_lo // TILE * TILE, kv_hi, TILE, num_stages=1):
            key_T = tile + tok_T
            seen_T = (key_T >= kv_lo) & (key_T < kv_hi)
            visible_MT = seen_T[None, :] & (key_T[None, :] <= pos_M[:, None]) & (key_T[None, :] >= pos_M[:, None] - WINDOW)
            page_T = tl.load(table_row + key_T // PAGE, mask=seen_T, other=0)
            v_row_T = v_ptr + page_T.to(tl.int64) * v_stride_page + head * V_STRIDE_HEAD + (key_T % PAGE) * V_STRIDE_TOK
            for d in tl.range(0, V_HEAD_DIM, 16, num_stages=1):
                e_W = d + tl.arange(0, 16)
                v_TW = tl.load(v_row_T[:, None] + e_W[None, :], mask=seen_T[:, None] & (e_W < V_HEAD_DIM)[None, :], other=0.0)
                count_MW = count_wild(visible_MT, v_TW.to(tl.float32))
                at_MW = out_M[:, None] + e_W[None, :]
                wild_MW = (count_MW > 0) & live_M[:, None]
                out_MW = add_wild(tl.load(at_MW, mask=wild_MW, other=0.0).to(tl.float32), count_MW)
                tl.store(at_MW, out_MW.to(tl.float16), mask=wild_MW)
