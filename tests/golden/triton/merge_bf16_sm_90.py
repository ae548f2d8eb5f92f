"""merge: join attention states of the same queries over different keys.

spec dd71d05d (bf16-bf16-hnd-16-8x4-128-True-None-bf16), target sm_90, bf16
schedule: num_warps=1 rows=4

One program joins ROWS rows (token, query head) of all states. Empty states (lse = -inf) add nothing; none, or
only empty ones, give (0, -inf). out and lse may be one of the inputs: a row is read whole before it is written.
"""

import triton
import triton.language as tl

Q_HEADS = tl.constexpr(32)  # query heads
V_HEAD_DIM = tl.constexpr(128)  # elements of an output row
ROWS = tl.constexpr(4)  # rows (token, query head) of a program


@triton.jit
def merge(
    outs_ptr,  # bf16: partial outputs, N x T x q_heads x v_head_dim
    outs_stride_state: tl.int64,  # elements
    outs_stride_tok: tl.int64,  # elements
    outs_stride_head: tl.int64,  # elements
    lses_ptr,  # f32: their base-2 logsumexp, N x T x q_heads
    lses_stride_state: tl.int64,  # elements
    lses_stride_tok: tl.int64,  # elements
    out_ptr,  # bf16: merged output, T x q_heads x v_head_dim
    out_stride_tok: tl.int64,  # elements
    out_stride_head: tl.int64,  # elements
    lse_ptr,  # f32: merged logsumexp, T x q_heads
    lse_stride_tok: tl.int64,  # elements
    num_states: tl.int32,  # states N
    num_tokens: tl.int32,  # rows T
):
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token_R = row_R // Q_HEADS
    head_R = row_R % Q_HEADS
    live_R = token_R < num_tokens
    outs_R = outs_ptr + token_R * outs_stride_tok + head_R * outs_stride_head
    lses_R = lses_ptr + token_R * lses_stride_tok + head_R
    m_R = tl.full([ROWS], float("-inf"), tl.float32)
    l_R = tl.zeros([ROWS], tl.float32)
    d_D = tl.arange(0, 128)
    acc_RD = tl.zeros([ROWS, 128], tl.float32)
    for state in range(num_states):
        lse_R = tl.load(lses_R + state * lses_stride_state, mask=live_R, other=float("-inf"))
        has_R = lse_R != float("-inf")  # whatever an empty state's out holds is not even loaded
        out_RD = tl.load((outs_R + state * outs_stride_state)[:, None] + d_D[None, :], mask=has_R[:, None], other=0.0).to(tl.float32)
        m_next = tl.maximum(m_R, lse_R)
        m_safe = tl.where(m_next == float("-inf"), 0.0, m_next)  # -inf - -inf would be NaN
        alpha_R = tl.exp2(m_R - m_safe)
        w_R = tl.exp2(lse_R - m_safe)
        m_R = m_next
        l_R = l_R * alpha_R + w_R
        acc_RD = acc_RD * alpha_R[:, None] + out_RD * w_R[:, None]

    lse_R = tl.where(l_R == 0.0, float("-inf"), m_R + tl.log2(l_R))
    tl.store(lse_ptr + token_R * lse_stride_tok + head_R, lse_R, mask=live_R)
    safe_R = tl.where(l_R == 0.0, 1.0, l_R)
    # An IEEE division: one state that meets only empty ones comes back bit by bit.
    out_RD = tl.div_rn(acc_RD, tl.broadcast_to(safe_R[:, None], [ROWS, 128]))
    tl.store(
        out_ptr + (token_R * out_stride_tok + head_R * out_stride_head)[:, None] + d_D[None, :],
        out_RD.to(tl.bfloat16), mask=live_R[:, None],
    )
