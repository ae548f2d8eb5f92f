"""Expressions of one's own, as a spec may hold them: together they use all of the language."""

from __future__ import annotations

from typing import Any

PARAMS: dict[str, dict[str, Any]] = {
    "slope": {"dims": ["head"], "dtype": "f32"},
    "lead": {"dims": ["batch"], "dtype": "i32"},
    "tag": {"dims": ["batch", "kv"], "dtype": "i32"},
    "words": {"dims": ["q"], "dtype": "i64"},
    "shown": {"dims": ["q", "kv"], "dtype": "bits"},
    "bias": {"dims": ["head", "kv"], "dtype": "f32"},
    "odd": {"dims": ["head"], "dtype": "bool"},
}

SCORES = (
    "score - slope[head] * abs(q_pos - kv_pos)",
    "where(kv_pos % 7 == 3, score, score * 0.5 - log2(1 + abs(q_pos - kv_pos)))",
    "score + bias[head, kv_pos] * sigmoid(score) - exp(-0.01 * (kv_len - kv_pos)) / 3",
    "max(min(score, 2.5), -2.5) + sqrt(kv_pos) * exp2(-head - 3) + tanh(slope[head] * score)",
    "score - where(odd[head], 0.125, 0.25) * (q_pos // 5 - kv_pos // 5) + log(2 + kv_head) - q_len / 9",
    "score + 0.5 * float(tag[batch, kv_pos] % 3 == tag[batch, q_pos] % 3) - 0.01 * int(4 * score)",
)
MASKS = (
    "kv_pos <= q_pos or kv_pos < lead[batch]",
    "abs(q_pos - kv_pos) <= 20 and not kv_pos % 4 == 1",
    "0 <= q_pos - kv_pos < 30 or (words[q_row] >> (kv_pos & 63)) & 1 == 1",
    "shown[q_row, kv_pos] ^ (tag[batch, kv_pos] > tag[batch, q_pos])",
    "kv_pos // 16 == q_pos // 16 or ~(kv_pos > 3) | (head == 1)",
    "min(kv_pos, 40) * 2 >= max(q_pos, -3) - (1 << kv_pos % 5) and (kv_pos | 1) != (q_pos ^ 9)",
)


def params_in(*texts: str) -> dict[str, dict[str, Any]]:
    """The declarations that texts need."""
    return {name: param for name, param in PARAMS.items() if any(f"{name}[" in text for text in texts)}
