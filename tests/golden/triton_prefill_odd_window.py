"""prefill: attention of ragged queries over a paged cache.

spec 1cd0add7, target sm_90
schedule: edges=async ids=inline num_stages=2 num_warps=8 rows=64 tile=64

6 query heads over 2 KV heads of 72 elements (causal, aligned to the last key, window of 128 earlier keys).
q f16, K f16, V int8.
Pages of 5 tokens laid out 'kv page tok head d'.
One program attends with one tile of a request's query rows to all keys they see.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(3)  # query heads that share one KV head
ROWS = tl.constexpr(64)  # query rows of a tile: (token, head of the group) packed
TILE = tl.constexpr(64)  # keys of a tile
PAGE = tl.constexpr(5)  # tokens of a page
WINDOW = tl.constexpr(128)  # earlier keys that a query sees
K_STRIDE_TOK = tl.constexpr(192)  # elements from one token to the next
K_STRIDE_HEAD = tl.constexpr(96)  # elements from one head to the next
V_STRIDE_TOK = tl.constexpr(128)  # words from one token to the next
V_STRIDE_HEAD = tl.constexpr(64)  # words from one head to the next


@triton.jit
def page_offset(ids, stride, MULTIPLE: tl.constexpr):
    """ids * stride in 64 bits: one instruction. ``stride`` is a multiple of MULTIPLE."""
    offset = tl.inline_asm_elementwise(
        "mul.wide.u32 $0, $1, $2;", "=l,r,r", [ids, stride], dtype=tl.int64, is_pure=True, pack=1
    )
    return tl.multiple_of(offset, [MULTIPLE])


@triton.jit
def words_to_f16(x):
    """int16 words of two int8 codes -> the even (low) and the odd (high) codes as f16, exactly."""
    # A register holds the words of two tokens: b0 b1 of one, b2 b3 of the next.
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 biased, even, odd, bias;
        xor.b32 biased, $2, 0x80808080;
        mov.b32 bias, 0x64806480;
        prmt.b32 even, biased, 0x64646464, 0x4240;
        prmt.b32 odd, biased, 0x64646464, 0x4341;
        sub.rn.f16x2 $0, even, bias;
        sub.rn.f16x2 $1, odd, bias;
        }""",
        "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
    )


@triton.jit
def prefill(
    q_ptr,  # f16: queries, T x q_heads x head_dim
    q_stride_tok: tl.int64,  # elements
    q_stride_head: tl.int64,  # elements
    q_starts_ptr,  # i32: first query row of each request, B+1
    k_ptr,  # f16: k plane
    k_stride_page: tl.int32,  # elements
    v_ptr,  # bytes as int16 words: v plane
    v_stride_page: tl.int32,  # elements
    v_scale_ptr,  # f32: one scale per KV head
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
    k_d1_D = 64 + tl.arange(0, 16)
    v_d0_D = tl.arange(0, 64)
    v_d1_D = 64 + tl.arange(0, 32)
    # V is read as int16 words of two bytes; strides, given in bytes, are counted in words from here on.
    v_w0_D = tl.arange(0, 32)
    v_w1_D = 32 + tl.arange(0, 16)
    v_stride_page = v_stride_page // 2
    k_head0_D = k_ptr + head * K_STRIDE_HEAD + k_d0_D
    k_head1_D = k_ptr + head * K_STRIDE_HEAD + k_d1_D
    v_head0_D = v_ptr + head * V_STRIDE_HEAD + v_w0_D
    v_head1_D = v_ptr + head * V_STRIDE_HEAD + v_w1_D

    q_row_M = q_ptr + (q_first + token_M) * q_stride_tok + head_M * q_stride_head
    q0_MD = tl.load(q_row_M[:, None] + k_d0_D[None, :], mask=live_M[:, None], other=0.0)
    q1_MD = tl.load(q_row_M[:, None] + k_d1_D[None, :], mask=live_M[:, None] & (k_d1_D < 72)[None, :], other=0.0)

    # True -inf: a very negative logit is a legal value, so no finite number can stand for "no key yet".
    m_M = tl.full([ROWS], float("-inf"), tl.float32)
    l_M = tl.zeros([ROWS], tl.float32)
    acc0_even_MD = tl.zeros([ROWS, 32], tl.float32)
    acc0_odd_MD = tl.zeros([ROWS, 32], tl.float32)
    acc1_even_MD = tl.zeros([ROWS, 16], tl.float32)
    acc1_odd_MD = tl.zeros([ROWS, 16], tl.float32)

    # The first tiles: not seen by every row.
    for tile in tl.range(kv_lo // TILE * TILE, body_lo, TILE):
        column = (tile + tok_T) // PAGE
        ids_T = tl.load(table_row + column, mask=(column >= kv_lo // PAGE) & (column < table_end), other=0)
        slot_T = (tile + tok_T) % PAGE
        key_T = tile + tok_T
        seen_T = (key_T >= kv_lo) & (key_T < kv_hi)
        visible_MT = seen_T[None, :] & (key_T[None, :] <= pos_M[:, None]) & (key_T[None, :] + WINDOW >= pos_M[:, None])
        k_at_T = page_offset(ids_T, k_stride_page, 16) + slot_T * K_STRIDE_TOK
        k0_TD = tl.load(k_head0_D[None, :] + k_at_T[:, None], mask=seen_T[:, None], other=0)
        k1_TD = tl.load(k_head1_D[None, :] + k_at_T[:, None], mask=seen_T[:, None] & (k_d1_D < 72)[None, :], other=0)
        s_MT = tl.dot(q0_MD, tl.trans(k0_TD))
        s_MT = tl.dot(q1_MD, tl.trans(k1_TD), s_MT)
        s_MT = tl.where(visible_MT, s_MT, float("-inf"))
        m_next = tl.maximum(m_M, tl.max(s_MT, 1) * score_scale)
        safe = tl.where(m_next == float("-inf"), 0.0, m_next)
        p_MT = tl.exp2(s_MT * score_scale - safe[:, None])
        alpha_M = tl.exp2(m_M - safe)
        m_M = m_next
        l_M = l_M * alpha_M + tl.sum(p_MT, 1)
        v_at_T = page_offset(ids_T, v_stride_page, 8) + slot_T * V_STRIDE_TOK
        v0_even_TD, v0_odd_TD = words_to_f16(tl.load(v_head0_D[None, :] + v_at_T[:, None], mask=seen_T[:, None], other=0))
        v1_even_TD, v1_odd_TD = words_to_f16(tl.load(v_head1_D[None, :] + v_at_T[:, None], mask=seen_T[:, None] & (v_w1_D < 36)[None, :], other=0))
        w_MT = p_MT.to(tl.float16)
        acc0_even_MD = tl.dot(w_MT, v0_even_TD, acc0_even_MD * alpha_M[:, None])
        acc0_odd_MD = tl.dot(w_MT, v0_odd_TD, acc0_odd_MD * alpha_M[:, None])
        acc1_even_MD = tl.dot(w_MT, v1_even_TD, acc1_even_MD * alpha_M[:, None])
        acc1_odd_MD = tl.dot(w_MT, v1_odd_TD, acc1_odd_MD * alpha_M[:, None])

    # Full tiles, seen by every row: no masks.
    for tile in tl.range(body_lo, body_hi, TILE):
        ids_T = tl.load(table_row + (tile + tok_T) // PAGE)
        slot_T = (tile + tok_T) % PAGE
        k_at_T = page_offset(ids_T, k_stride_page, 16) + slot_T * K_STRIDE_TOK
        k0_TD = tl.load(k_head0_D[None, :] + k_at_T[:, None])
        k1_TD = tl.load(k_head1_D[None, :] + k_at_T[:, None], mask=(k_d1_D < 72)[None, :], other=0)
        s_MT = tl.dot(q0_MD, tl.trans(k0_TD))
        s_MT = tl.dot(q1_MD, tl.trans(k1_TD), s_MT)
        # The scale is applied after the maximum: one multiply-add an element.
        m_next = tl.maximum(m_M, tl.max(s_MT, 1) * score_scale)
        # A row without a key so far has -inf, and -inf - -inf is NaN: subtract 0 there.
        safe = tl.where(m_next == float("-inf"), 0.0, m_next)
        p_MT = tl.exp2(s_MT * score_scale - safe[:, None])
        alpha_M = tl.exp2(m_M - safe)
        m_M = m_next
        l_M = l_M * alpha_M + tl.sum(p_MT, 1)
        v_at_T = page_offset(ids_T, v_stride_page, 8) + slot_T * V_STRIDE_TOK
        v0_even_TD, v0_odd_TD = words_to_f16(tl.load(v_head0_D[None, :] + v_at_T[:, None]))
        v1_even_TD, v1_odd_TD = words_to_f16(tl.load(v_head1_D[None, :] + v_at_T[:, None], mask=(v_w1_D < 36)[None, :], other=0))
        w_MT = p_MT.to(tl.float16)
        acc0_even_MD = tl.dot(w_MT, v0_even_TD, acc0_even_MD * alpha_M[:, None])
        acc0_odd_MD = tl.dot(w_MT, v0_odd_TD, acc0_odd_MD * alpha_M[:, None])
        acc1_even_MD = tl.dot(w_MT, v1_even_TD, acc1_even_MD * alpha_M[:, None])
        acc1_odd_MD = tl.dot(w_MT, v1_odd_TD, acc1_odd_MD * alpha_M[:, None])

    # The last tiles: past the end of the keys, or not seen by every row.
    for tile in tl.range(body_hi, kv_hi, TILE):
        column = (tile + tok_T) // PAGE
        ids_T = tl.load(table_row + column, mask=(column >= kv_lo // PAGE) & (column < table_end), other=0)
        slot_T = (tile + tok_T) % PAGE
        key_T = tile + tok_T
        seen_T = (key_T >= kv_lo) & (key_T < kv_hi)
        visible_MT = seen_T[None, :] & (key_T[None, :] <= pos_M[:, None]) & (key_T[None, :] + WINDOW >= pos_M[:, None])
        k_at_T = page_offset(ids_T, k_stride_page, 16) + slot_T * K_STRIDE_TOK
        k0_TD = tl.load(k_head0_D[None, :] + k_at_T[:, None], mask=seen_T[:, None], other=0)
        k1_TD = tl.load(k_head1_D[None, :] + k_at_T[:, None], mask=seen_T[:, None] & (k_d1_D < 72)[None, :], other=0)
        s_MT = tl.dot(q0_MD, tl.trans(k0_TD))
        s_MT = tl.dot(q1_MD, tl.trans(k1_TD), s_MT)
        s_MT = tl.where(visible_MT, s_MT, float("-inf"))
        m_next = tl.maximum(m_M, tl.max(s_MT, 1) * score_scale)
        safe = tl.where(m_next == float("-inf"), 0.0, m_next)
        p_MT = tl.exp2(s_MT * score_scale - safe[:, None])
        alpha_M = tl.exp2(m_M - safe)
        m_M = m_next
        l_M = l_M * alpha_M + tl.sum(p_MT, 1)
        v_at_T = page_offset(ids_T, v_stride_page, 8) + slot_T * V_STRIDE_TOK
        v0_even_TD, v0_odd_TD = words_to_f16(tl.load(v_head0_D[None, :] + v_at_T[:, None], mask=seen_T[:, None], other=0))
        v1_even_TD, v1_odd_TD = words_to_f16(tl.load(v_head1_D[None, :] + v_at_T[:, None], mask=seen_T[:, None] & (v_w1_D < 36)[None, :], other=0))
        w_MT = p_MT.to(tl.float16)
        acc0_even_MD = tl.dot(w_MT, v0_even_TD, acc0_even_MD * alpha_M[:, None])
        acc0_odd_MD = tl.dot(w_MT, v0_odd_TD, acc0_odd_MD * alpha_M[:, None])
        acc1_even_MD = tl.dot(w_MT, v1_even_TD, acc1_even_MD * alpha_M[:, None])
        acc1_odd_MD = tl.dot(w_MT, v1_odd_TD, acc1_odd_MD * alpha_M[:, None])

    # The rows once more: kept through the loops, they would take registers. The minimum is 0, which the compiler
    # cannot know; else it would keep the first ones.
    row_M = (row_tile + tl.minimum(kv_len, 0)) * ROWS + tl.arange(0, ROWS)
    token_M = row_M // GROUP
    head_M = head * GROUP + row_M % GROUP
    live_M = token_M < q_len
    # No key: out 0 and lse -inf, the empty state.
    lse_M = tl.where(l_M == 0.0, float("-inf"), m_M + tl.log2(l_M))
    gain_M = 1.0 / tl.where(l_M == 0.0, 1.0, l_M)
    gain_M *= tl.load(v_scale_ptr + head)
    out0_MD = tl.interleave(acc0_even_MD, acc0_odd_MD) * gain_M[:, None]
    out1_MD = tl.interleave(acc1_even_MD, acc1_odd_MD) * gain_M[:, None]
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
