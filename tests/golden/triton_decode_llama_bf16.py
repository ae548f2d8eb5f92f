"""decode: attention of short queries over a paged cache, cut into splits of the keys.

spec dd71d05d, target sm_90, single
schedule: fold_rows=1 ids=inline num_stages=5 num_warps=2 split_tokens=512 tile=64 unroll=1

32 query heads over 8 KV heads of 128 elements.
q bf16, K bf16, V bf16.
Pages of 16 tokens laid out 'page kv head tok d'.
One program attends to one split of a request's keys with one tile of query rows and leaves
the state (out, lse) in the workspace; merge_splits joins the states. Logsumexp is base 2.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(4)  # query heads that share one KV head
ROWS = tl.constexpr(16)  # query rows of a tile: (token, head of the group) packed
TILE = tl.constexpr(64)  # keys of a tile
PAGE = tl.constexpr(16)  # tokens of a page
V_HEAD_DIM = tl.constexpr(128)  # elements of an output row
Q_HEADS = tl.constexpr(32)  # query heads
SPLIT_TOKENS = tl.constexpr(512)  # keys of a split
SPLIT_ROW = tl.constexpr(132)  # floats of a split's state: output, then logsumexp
MERGE_ROWS = tl.constexpr(1)  # rows that one program merges
K_STRIDE_HEAD = tl.constexpr(2048)  # elements from one head to the next
K_STRIDE_TOK = tl.constexpr(128)  # elements from one token to the next
V_STRIDE_HEAD = tl.constexpr(2048)  # elements from one head to the next
V_STRIDE_TOK = tl.constexpr(128)  # elements from one token to the next


@triton.jit
def page_offset(ids, stride, MULTIPLE: tl.constexpr):
    """ids * stride in 64 bits: one instruction. ``stride`` is a multiple of MULTIPLE."""
    offset = tl.inline_asm_elementwise(
        "mul.wide.u32 $0, $1, $2;", "=l,r,r", [ids, stride], dtype=tl.int64, is_pure=True, pack=1
    )
    return tl.multiple_of(offset, [MULTIPLE])


@triton.jit
def decode_split(
    q_ptr,  # bf16: queries, T x q_heads x head_dim
    q_stride_tok: tl.int64,  # elements
    q_stride_head: tl.int64,  # elements
    k_ptr,  # bf16: k plane
    k_stride_page: tl.int32,  # elements
    v_ptr,  # bf16: v plane
    v_stride_page: tl.int32,  # elements
    page_table_ptr,  # i32: page ids, B x P
    table_stride: tl.int64,  # elements from one request's row to the next
    kv_lens_ptr,  # i32: keys of each request, B
    score_scale: tl.float32,  # attention scale times log2(e)
    workspace_ptr,  # f32: states of the splits, T x q_heads x splits x SPLIT_ROW
):
    b = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)

    kv_len = tl.load(kv_lens_ptr + b)
    row_M = tl.arange(0, ROWS)
    head_M = head * GROUP + row_M
    live_M = row_M < GROUP

    # This split's keys [kv_lo, kv_hi): what no row sees is never visited, its pages are never looked up.
    kv_lo = split * SPLIT_TOKENS
    kv_hi = tl.minimum(kv_len, kv_lo + SPLIT_TOKENS)
    if kv_lo >= kv_hi:
        return  # an empty split writes nothing: the merge skips exactly these
    # Tiles inside [body_lo, body_hi) are seen by every row and need no mask.
    body_lo = kv_lo
    body_hi = tl.maximum(kv_hi // TILE * TILE, body_lo)
    table_row = page_table_ptr + b.to(tl.int64) * table_stride
    table_end = tl.cdiv(kv_hi, PAGE)  # columns from here on may hold anything

    tok_T = tl.arange(0, TILE)
    page_N = tl.arange(0, TILE // PAGE)
    tok_P = tl.arange(0, PAGE)
    k_d_D = tl.arange(0, 128)
    v_d_D = tl.arange(0, 128)
    k_page_PD = k_ptr + head * K_STRIDE_HEAD + tok_P[:, None] * K_STRIDE_TOK + k_d_D[None, :]
    v_page_PD = v_ptr + head * V_STRIDE_HEAD + tok_P[:, None] * V_STRIDE_TOK + v_d_D[None, :]

    q_row_M = q_ptr + b * q_stride_tok + (head * GROUP + row_M % 8) * q_stride_head  # each row twice
    q_MD = tl.load(q_row_M[:, None] + k_d_D[None, :], mask=(row_M % 8 < GROUP)[:, None], other=0.0)

    # True -inf: a very negative logit is a legal value, so no finite number can stand for "no key yet".
    m_H = tl.full([8], float("-inf"), tl.float32)
    l_HT = tl.zeros([8, TILE], tl.float32)
    acc_MD = tl.zeros([ROWS, 128], tl.float32)

    # Full tiles, seen by every row: no masks.
    for tile in tl.range(body_lo, body_hi, TILE):
        ids_N = tl.load(table_row + tile // PAGE + page_N)
        k_at_N = page_offset(ids_N, k_stride_page, 16)
        k_TD = tl.load(tl.reshape(k_page_PD[None, :, :] + k_at_N[:, None, None], [TILE, 128]))
        s_MT = tl.dot(q_MD, tl.trans(k_TD))
        s_HT = tl.max(tl.reshape(s_MT, [2, 8, TILE]), 0)  # rows 8 to 15 repeat rows 0 to 7
        # The scale is applied after the maximum: one multiply-add an element.
        m_next = tl.maximum(m_H, tl.max(s_HT, 1) * score_scale)
        # A row without a key so far has -inf, and -inf - -inf is NaN: subtract 0 there.
        safe = tl.where(m_next == float("-inf"), 0.0, m_next)
        p_HT = tl.exp2(s_HT * score_scale - safe[:, None])
        alpha_H = tl.exp2(m_H - safe)
        m_H = m_next
        l_HT = l_HT * alpha_H[:, None] + p_HT
        v_at_N = page_offset(ids_N, v_stride_page, 16)
        v_TD = tl.load(tl.reshape(v_page_PD[None, :, :] + v_at_N[:, None, None], [TILE, 128]))
        alpha_M = tl.reshape(tl.broadcast_to(alpha_H[None, :], [2, 8]), [ROWS])
        w_MT = tl.reshape(tl.broadcast_to(p_HT[None, :, :], [2, 8, TILE]), [ROWS, TILE]).to(tl.bfloat16)
        acc_MD = tl.dot(w_MT, v_TD, acc_MD * alpha_M[:, None])

    # The last tiles: past the end of the keys, or not seen by every row.
    for tile in tl.range(body_hi, kv_hi, TILE, num_stages=1):
        column = tile // PAGE + page_N
        ids_N = tl.load(table_row + column, mask=column < table_end, other=0)
        key_T = tile + tok_T
        seen_T = key_T < kv_hi
        k_at_N = page_offset(ids_N, k_stride_page, 16)
        k_TD = tl.load(tl.reshape(k_page_PD[None, :, :] + k_at_N[:, None, None], [TILE, 128]), mask=seen_T[:, None], other=0)
        s_MT = tl.dot(q_MD, tl.trans(k_TD))
        s_HT = tl.max(tl.reshape(s_MT, [2, 8, TILE]), 0)  # rows 8 to 15 repeat rows 0 to 7
        s_HT = tl.where(seen_T[None, :], s_HT, float("-inf"))
        m_next = tl.maximum(m_H, tl.max(s_HT, 1) * score_scale)
        safe = tl.where(m_next == float("-inf"), 0.0, m_next)
        p_HT = tl.exp2(s_HT * score_scale - safe[:, None])
        alpha_H = tl.exp2(m_H - safe)
        m_H = m_next
        l_HT = l_HT * alpha_H[:, None] + p_HT
        v_at_N = page_offset(ids_N, v_stride_page, 16)
        v_TD = tl.load(tl.reshape(v_page_PD[None, :, :] + v_at_N[:, None, None], [TILE, 128]), mask=seen_T[:, None], other=0)
        alpha_M = tl.reshape(tl.broadcast_to(alpha_H[None, :], [2, 8]), [ROWS])
        w_MT = tl.reshape(tl.broadcast_to(p_HT[None, :, :], [2, 8, TILE]), [ROWS, TILE]).to(tl.bfloat16)
        acc_MD = tl.dot(w_MT, v_TD, acc_MD * alpha_M[:, None])

    l_H = tl.sum(l_HT, 1)
    # Rows 8 to 15 of acc repeat rows 0 to 7.
    l_M = tl.reshape(tl.broadcast_to(l_H[None, :], [2, 8]), [ROWS])
    m_M = tl.reshape(tl.broadcast_to(m_H[None, :], [2, 8]), [ROWS])
    # No key: out 0 and lse -inf, the empty state.
    lse_M = tl.where(l_M == 0.0, float("-inf"), m_M + tl.log2(l_M))
    gain_M = 1.0 / tl.where(l_M == 0.0, 1.0, l_M)
    out_MD = acc_MD * gain_M[:, None]
    row = b
    state_M = workspace_ptr + ((row * Q_HEADS + head_M).to(tl.int64) * tl.num_programs(2) + split) * SPLIT_ROW
    tl.store(state_M[:, None] + v_d_D[None, :], out_MD, mask=live_M[:, None])
    tl.store(state_M + V_HEAD_DIM, lse_M, mask=live_M)


@triton.jit
def merge_splits(
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
    live_R = row_R < Q_HEADS
    row_R = b * Q_HEADS + row_R
    # The splits that hold a key of each row: exactly these were written for it.
    first_R = tl.where(live_R, 0, num_splits)
    end_R = tl.where(live_R, tl.cdiv(kv_len, SPLIT_TOKENS), 0)
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
