"""decode: attention of short queries over a paged cache, cut into splits of the keys.

spec 24a5bc15, target sm_80, multi
schedule: ids=inline num_stages=5 num_warps=2 rows=16 split_tokens=512 tile=128 unroll=1

32 query heads over 8 KV heads of 128 elements (causal, aligned to the last key).
q bf16, K int8, V int8.
Pages of 16 tokens laid out 'page kv head tok d'.
One program attends to one split of a request's keys with one tile of query rows and leaves
the state (out, lse) in the workspace; merge_splits joins the states. Logsumexp is base 2.
"""

import triton
import triton.language as tl

DIGIT = tl.constexpr(254)  # low digits per high digit of q
GROUP = tl.constexpr(4)  # query heads that share one KV head
ROWS = tl.constexpr(16)  # query rows of a tile: (token, head of the group) packed
TILE = tl.constexpr(128)  # keys of a tile
PAGE = tl.constexpr(16)  # tokens of a page
KV_HEADS = tl.constexpr(8)  # KV heads
V_HEAD_DIM = tl.constexpr(128)  # elements of an output row
Q_HEADS = tl.constexpr(32)  # query heads
SPLIT_TOKENS = tl.constexpr(512)  # keys of a split
SPLIT_ROW = tl.constexpr(132)  # floats of a split's state: output, then logsumexp
MERGE_ROWS = tl.constexpr(1)  # rows that one program merges
K_STRIDE_HEAD = tl.constexpr(2048)  # elements from one head to the next
K_STRIDE_TOK = tl.constexpr(128)  # elements from one token to the next
K_SCALE_STRIDE_HEAD = tl.constexpr(16)  # elements from one head to the next
V_STRIDE_HEAD = tl.constexpr(1024)  # words from one head to the next
V_STRIDE_TOK = tl.constexpr(64)  # words from one token to the next
V_SCALE_STRIDE_HEAD = tl.constexpr(16)  # elements from one head to the next


@triton.jit
def page_offset(ids, stride, MULTIPLE: tl.constexpr):
    """ids * stride in 64 bits: one instruction. ``stride`` is a multiple of MULTIPLE."""
    offset = tl.inline_asm_elementwise(
        "mul.wide.u32 $0, $1, $2;", "=l,r,r", [ids, stride], dtype=tl.int64, is_pure=True, pack=1
    )
    return tl.multiple_of(offset, [MULTIPLE])


@triton.jit
def to_digits(x):
    """f32 in [-127, 127] -> int8 high and low with x = high + low / DIGIT, each rounded to nearest."""
    # 1.5 * 2**23 + x keeps only x's integer part: a rounding without a conversion.
    high = (x + 12582912.0) - 12582912.0
    low = ((x - high) * DIGIT + 12582912.0) - 12582912.0
    return high.to(tl.int8), low.to(tl.int8)


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
def decode_split(
    q_ptr,  # bf16: queries, T x q_heads x head_dim
    q_stride_tok: tl.int64,  # elements
    q_stride_head: tl.int64,  # elements
    q_starts_ptr,  # i32: first query row of each request, B+1
    k_ptr,  # int8: k plane
    k_stride_page: tl.int32,  # elements
    k_scale_ptr,  # f32: k_scale plane
    k_scale_stride_page: tl.int32,  # elements
    v_ptr,  # bytes as int16 words: v plane
    v_stride_page: tl.int32,  # elements
    v_scale_ptr,  # f32: v_scale plane
    v_scale_stride_page: tl.int32,  # elements
    page_table_ptr,  # i32: page ids, B x P
    table_stride: tl.int64,  # elements from one request's row to the next
    kv_lens_ptr,  # i32: keys of each request, B
    score_scale: tl.float32,  # attention scale times log2(e)
    workspace_ptr,  # f32: states of the splits, T x q_heads x splits x SPLIT_ROW
):
    b = tl.program_id(0)
    head = tl.program_id(1) % KV_HEADS
    row_tile = tl.program_id(1) // KV_HEADS
    split = tl.program_id(2)

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

    # This split's keys [kv_lo, kv_hi): what no row sees is never visited, its pages are never looked up.
    kv_lo = split * SPLIT_TOKENS
    kv_hi = tl.minimum(tl.maximum(last_pos + 1, 0), kv_lo + SPLIT_TOKENS)
    if kv_lo >= kv_hi:
        return  # an empty split writes nothing: the merge skips exactly these
    # Tiles inside [body_lo, body_hi) are seen by every row and need no mask.
    body_lo = kv_lo
    body_hi = tl.maximum(tl.minimum(tl.maximum(first_pos + 1, 0), kv_hi) // TILE * TILE, body_lo)
    table_row = page_table_ptr + b.to(tl.int64) * table_stride
    table_end = tl.cdiv(kv_hi, PAGE)  # columns from here on may hold anything

    tok_T = tl.arange(0, TILE)
    page_N = tl.arange(0, TILE // PAGE)
    tok_P = tl.arange(0, PAGE)
    k_d_D = tl.arange(0, 128)
    v_d_D = tl.arange(0, 128)
    # V is read as int16 words of two bytes; strides, given in bytes, are counted in words from here on.
    v_w_D = tl.arange(0, 64)
    v_stride_page = v_stride_page // 2
    k_page_PD = k_ptr + head * K_STRIDE_HEAD + tok_P[:, None] * K_STRIDE_TOK + k_d_D[None, :]
    k_scale_page_P = k_scale_ptr + head * K_SCALE_STRIDE_HEAD + tok_P
    v_page_PD = v_ptr + head * V_STRIDE_HEAD + tok_P[:, None] * V_STRIDE_TOK + v_w_D[None, :]
    v_scale_page_P = v_scale_ptr + head * V_SCALE_STRIDE_HEAD + tok_P

    q_row_M = q_ptr + (q_first + token_M) * q_stride_tok + head_M * q_stride_head
    q_MD = tl.load(q_row_M[:, None] + k_d_D[None, :], mask=live_M[:, None], other=0.0).to(tl.float32)
    # A unit for each row of q. As integers, magnitudes order finite < inf < NaN.
    q_bits_M = tl.max(q_MD.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    q_amax_M = q_bits_M.to(tl.float32, bitcast=True)
    q_inv_M = tl.where(q_amax_M > 2.0**-100, 127.0 / q_amax_M, 0.0)
    q_unit_M = tl.where(q_bits_M < 0x7F800000, q_amax_M / (127.0 * DIGIT), float("nan"))
    q_high_MD, q_low_MD = to_digits(q_MD * q_inv_M[:, None])
    score_M = q_unit_M * score_scale

    # True -inf: a very negative logit is a legal value, so no finite number can stand for "no key yet".
    m_M = tl.full([ROWS], float("-inf"), tl.float32)
    l_MT = tl.zeros([ROWS, TILE], tl.float32)
    acc_even_MD = tl.zeros([ROWS, 64], tl.float32)
    acc_odd_MD = tl.zeros([ROWS, 64], tl.float32)
    # Weights are counted in a unit that keeps them, times V's scales, below 2**14, where f16 holds them: the
    # largest scale seen, and a floor that keeps their sum finite. ref is what m would be in that unit.
    v_unit = 2.0**-97
    ref_M = m_M

    # Full tiles, seen by every row: no masks.
    for tile in tl.range(body_lo, body_hi, TILE):
        ids_N = tl.load(table_row + tile // PAGE + page_N)
        k_at_N = page_offset(ids_N, k_stride_page, 16)
        k_TD = tl.load(tl.reshape(k_page_PD[None, :, :] + k_at_N[:, None, None], [TILE, 128]))
        k_scale_at_N = page_offset(ids_N, k_scale_stride_page, 16)
        k_scale_T = tl.load(tl.reshape(k_scale_page_P[None, :] + k_scale_at_N[:, None], [TILE]))
        k_DT = tl.trans(k_TD)
        high_MT = tl.dot(q_high_MD, k_DT, out_dtype=tl.int32)
        low_MT = tl.dot(q_low_MD, k_DT, out_dtype=tl.int32)
        s_MT = (high_MT * DIGIT + low_MT).to(tl.float32)
        s_MT *= k_scale_T[None, :]
        v_scale_at_N = page_offset(ids_N, v_scale_stride_page, 16)
        v_scale_T = tl.load(tl.reshape(v_scale_page_P[None, :] + v_scale_at_N[:, None], [TILE]))
        # The scale is applied after the maximum: one multiply-add an element.
        m_M = tl.maximum(m_M, tl.max(s_MT, 1) * score_M)
        v_unit = tl.maximum(v_unit, tl.max(v_scale_T, 0) * 2.0**-14)
        ref_next = m_M + tl.log2(v_unit)
        # A row without a key so far has -inf, and -inf - -inf is NaN: subtract 0 there.
        safe = tl.where(ref_next == float("-inf"), 0.0, ref_next)
        p_MT = tl.exp2(s_MT * score_M[:, None] - safe[:, None])
        alpha_M = tl.exp2(ref_M - safe)
        ref_M = ref_next
        l_MT = l_MT * alpha_M[:, None] + p_MT
        v_at_N = page_offset(ids_N, v_stride_page, 8)
        v_even_TD, v_odd_TD = words_to_f16(tl.load(tl.reshape(v_page_PD[None, :, :] + v_at_N[:, None, None], [TILE, 64])))
        p_MT *= v_scale_T[None, :]
        w_MT = p_MT.to(tl.float16)
        acc_even_MD = tl.dot(w_MT, v_even_TD, acc_even_MD * alpha_M[:, None])
        acc_odd_MD = tl.dot(w_MT, v_odd_TD, acc_odd_MD * alpha_M[:, None])

    # The last tiles: past the end of the keys, or not seen by every row.
    for tile in tl.range(body_hi, kv_hi, TILE, num_stages=1):
        column = tile // PAGE + page_N
        ids_N = tl.load(table_row + column, mask=column < table_end, other=0)
        key_T = tile + tok_T
        seen_T = key_T < kv_hi
        visible_MT = seen_T[None, :] & (key_T[None, :] <= pos_M[:, None])
        k_at_N = page_offset(ids_N, k_stride_page, 16)
        k_TD = tl.load(tl.reshape(k_page_PD[None, :, :] + k_at_N[:, None, None], [TILE, 128]), mask=seen_T[:, None], other=0)
        k_scale_at_N = page_offset(ids_N, k_scale_stride_page, 16)
        k_scale_T = tl.load(tl.reshape(k_scale_page_P[None, :] + k_scale_at_N[:, None], [TILE]), mask=seen_T, other=0.0)
        k_DT = tl.trans(k_TD)
        high_MT = tl.dot(q_high_MD, k_DT, out_dtype=tl.int32)
        low_MT = tl.dot(q_low_MD, k_DT, out_dtype=tl.int32)
        s_MT = (high_MT * DIGIT + low_MT).to(tl.float32)
        s_MT *= k_scale_T[None, :]
        s_MT = tl.where(visible_MT, s_MT, float("-inf"))
        v_scale_at_N = page_offset(ids_N, v_scale_stride_page, 16)
        v_scale_T = tl.load(tl.reshape(v_scale_page_P[None, :] + v_scale_at_N[:, None], [TILE]), mask=seen_T, other=0.0)
        m_M = tl.maximum(m_M, tl.max(s_MT, 1) * score_M)
        v_unit = tl.maximum(v_unit, tl.max(v_scale_T, 0) * 2.0**-14)
        ref_next = m_M + tl.log2(v_unit)
        safe = tl.where(ref_next == float("-inf"), 0.0, ref_next)
        p_MT = tl.exp2(s_MT * score_M[:, None] - safe[:, None])
        alpha_M = tl.exp2(ref_M - safe)
        ref_M = ref_next
        l_MT = l_MT * alpha_M[:, None] + p_MT
        v_at_N = page_offset(ids_N, v_stride_page, 8)
        v_even_TD, v_odd_TD = words_to_f16(tl.load(tl.reshape(v_page_PD[None, :, :] + v_at_N[:, None, None], [TILE, 64]), mask=seen_T[:, None], other=0))
        p_MT *= v_scale_T[None, :]
        # A scale may be NaN (its row held NaN): it must not reach rows that do not see the key.
        p_MT = tl.where(visible_MT, p_MT, 0.0)
        w_MT = p_MT.to(tl.float16)
        acc_even_MD = tl.dot(w_MT, v_even_TD, acc_even_MD * alpha_M[:, None])
        acc_odd_MD = tl.dot(w_MT, v_odd_TD, acc_odd_MD * alpha_M[:, None])

    l_M = tl.sum(l_MT, 1)
    # No key: out 0 and lse -inf, the empty state.
    lse_M = tl.where(l_M == 0.0, float("-inf"), ref_M + tl.log2(l_M))
    gain_M = 1.0 / tl.where(l_M == 0.0, 1.0, l_M)
    out_MD = tl.interleave(acc_even_MD, acc_odd_MD) * gain_M[:, None]
    row = q_first + token_M
    state_M = workspace_ptr + ((row * Q_HEADS + head_M).to(tl.int64) * tl.num_programs(2) + split) * SPLIT_ROW
    tl.store(state_M[:, None] + v_d_D[None, :], out_MD, mask=live_M[:, None])
    tl.store(state_M + V_HEAD_DIM, lse_M, mask=live_M)


@triton.jit
def merge_splits(
    q_starts_ptr,  # i32: first query row of each request, B+1
    kv_lens_ptr,  # i32: keys of each request, B
    out_ptr,  # bf16: outputs, T x q_heads x v_head_dim
    out_stride_tok: tl.int64,  # elements
    out_stride_head: tl.int64,  # elements
    lse_ptr,  # f32: base-2 logsumexp, T x q_heads
    lse_stride_tok: tl.int64,  # elements
    workspace_ptr,  # f32: states of the splits, T x q_heads x splits x SPLIT_ROW
    num_splits: tl.int32,  # splits of the grid
):
    b = tl.program_id(0)
    kv_len = tl.load(kv_lens_ptr + b)
    row_R = tl.program_id(1) * MERGE_ROWS + tl.arange(0, MERGE_ROWS)  # (token, query head) of the request
    q_first = tl.load(q_starts_ptr + b)
    q_len = tl.load(q_starts_ptr + b + 1) - q_first
    live_R = row_R < q_len * Q_HEADS
    row_R = q_first * Q_HEADS + row_R
    pos_R = kv_len - q_len + row_R // Q_HEADS - q_first
    # The splits that hold a key of each row: exactly these were written for it.
    first_R = tl.where(live_R, 0, num_splits)
    end_R = tl.where(live_R, tl.cdiv(tl.maximum(pos_R + 1, 0), SPLIT_TOKENS), 0)
    state_R = workspace_ptr + row_R.to(tl.int64) * num_splits * SPLIT_ROW

    m_R = tl.full([MERGE_ROWS], float("-inf"), tl.float32)
    l_R = tl.zeros([MERGE_ROWS], tl.float32)
    d_D = tl.arange(0, 128)
    acc_RD = tl.zeros([MERGE_ROWS, 128], tl.float32)
    for split in tl.range(tl.min(first_R, 0), tl.max(end_R, 0)):
        has_R = (split >= first_R) & (split < end_R)
        at_R = state_R + split * SPLIT_ROW
        lse_R = tl.load(at_R + V_HEAD_DIM, mask=has_R, other=float("-inf"))
        out_RD = tl.load(at_R[:, None] + d_D[None, :], mask=has_R[:, None], other=0.0)
        m_next = tl.maximum(m_R, lse_R)
        m_safe = tl.where(m_next == float("-inf"), 0.0, m_next)
        alpha_R = tl.exp2(m_R - m_safe)
        w_R = tl.exp2(lse_R - m_safe)
        m_R = m_next
        l_R = l_R * alpha_R + w_R
        acc_RD = acc_RD * alpha_R[:, None] + out_RD * w_R[:, None]

    token_R = row_R // Q_HEADS
    head_R = row_R % Q_HEADS
    lse_R = tl.where(l_R == 0.0, float("-inf"), m_R + tl.log2(l_R))
    tl.store(lse_ptr + token_R * lse_stride_tok + head_R, lse_R, mask=live_R)
    safe_R = tl.where(l_R == 0.0, 1.0, l_R)
    out_RD = acc_RD / safe_R[:, None]
    out_RD = tl.where(tl.abs(out_RD) == float("inf"), float("nan"), out_RD)
    tl.store(
        out_ptr + (token_R * out_stride_tok + head_R * out_stride_head)[:, None] + d_D[None, :],
        out_RD.to(tl.bfloat16), mask=live_R[:, None],
    )
