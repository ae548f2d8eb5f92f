"""Faults in the Triton of rendered kernels, met in the interpreter."""

from __future__ import annotations

from tests.mutants.fault import kernel

NUMERICS = "tests/conformance/test_numerics.py::"
SHAPES = "tests/conformance/test_shapes.py::"
TERMS = "tests/conformance/test_terms.py::"
ROWS = "tests/backends/triton/test_kernels_rows.py::"
ATTENTION = "tests/backends/triton/test_kernels_attention.py::"

kernel(
    "triton-output-not-rescaled",
    "What attention summed so far is not scaled down when a larger score comes.",
    "triton decode prefill",
    r"(acc\w*_MD) \* alpha_M\[:, None\]",
    r"\1",
    SHAPES + "test_line_09_group_of_seven[interpret-default]",
)
kernel(
    "triton-weight-not-rescaled",
    "The sum of weights is not scaled down when a larger score comes.",
    "triton decode prefill",
    r"l_HT \* alpha_H\[:, None\] \+|l_M \* alpha_M \+ tl\.sum",
    lambda match: "l_HT +" if match[0].startswith("l_HT") else "l_M + tl.sum",
    SHAPES + "test_line_09_group_of_seven[interpret-default]",
)
kernel(
    "triton-none-minus-none",
    "Where no key has been seen, -inf is subtracted from -inf.",
    "triton decode prefill",
    r'safe = tl\.where\(m_next == float\("-inf"\), 0\.0, m_next\)',
    "safe = m_next",
    NUMERICS + "test_line_03_fully_masked_rows[interpret-prefill]",
)
kernel(
    "triton-unused-values-are-read",
    "V behind the last key of a request is read.",
    "triton decode prefill",
    r"(v\w*_TD = tl\.load\(.*), mask=seen_T\[:, None\], other=0\)",
    r"\1)",
    NUMERICS + "test_line_07_poison_stays_where_it_is[interpret-f32]",
)
kernel(
    "triton-key-mask-dropped",
    "Scores of keys that a row does not see keep their values.",
    "triton decode prefill",
    r's_(\w+) = tl\.where\((seen_T\[None, :\]|visible_\w+), s_\w+, float\("-inf"\)\)',
    r"s_\1 = s_\1",
    NUMERICS + "test_line_03_fully_masked_rows[interpret-prefill]",
)
kernel(
    "triton-one-key-too-many",
    "The key behind the last one of a request is seen.",
    "triton decode prefill",
    r"key_T < kv_hi",
    "key_T <= kv_hi",
    NUMERICS + "test_line_02_one_key_gives_v[interpret-f32]",
)
kernel(
    "triton-own-key-hidden",
    "A query does not see the key at its own position.",
    "triton decode prefill",
    r"key_T\[None, :\] <= pos_M\[:, None\]",
    "key_T[None, :] < pos_M[:, None]",
    TERMS + "test_line_23_each_mask_shows_exactly_its_keys[interpret-causal]",
)
kernel(
    "triton-window-one-short",
    "A window shows one earlier key less.",
    "triton decode prefill",
    r"\+ WINDOW >= pos_M",
    "+ WINDOW > pos_M",
    TERMS + "test_line_23_each_mask_shows_exactly_its_keys[interpret-window]",
)
kernel(
    "triton-last-tile-unmasked",
    "The tile that holds the last key is taken as full.",
    "triton decode prefill",
    r"kv_hi // TILE \* TILE",
    "tl.cdiv(kv_hi, TILE) * TILE",
    NUMERICS + "test_line_07_poison_stays_where_it_is[interpret-f32]",
)
kernel(
    "triton-last-split-forgotten",
    "The merge leaves out a last split that is not full.",
    "triton decode",
    r"tl\.cdiv\(kv_len, SPLIT_TOKENS\)",
    "kv_len // SPLIT_TOKENS",
    NUMERICS + "test_line_02_one_key_gives_v[interpret-f32]",
)
kernel(
    "triton-splits-weigh-the-same",
    "The splits of a request are merged without their weights.",
    "triton decode",
    r"w_R = tl\.exp2\(lse_R - m_safe\)",
    "w_R = tl.exp2(lse_R * 0)",
    SHAPES + "test_line_09_group_of_seven[interpret-split-256]",
)
kernel(
    "triton-empty-state-of-weight-one",
    "A row without keys leaves a logsumexp of 0 instead of -inf.",
    "triton prefill",
    r'lse_M = tl\.where\(l_M == 0\.0, float\("-inf"\)',
    "lse_M = tl.where(l_M == 0.0, 0.0",
    NUMERICS + "test_line_03_fully_masked_rows[interpret-prefill]",
)
kernel(
    "triton-top-left-alignment",
    "The queries of a chunk sit on the first keys instead of the last.",
    "triton prefill",
    r"pos_M = kv_len - q_len \+ token_M",
    "pos_M = token_M",
    ATTENTION + "test_ragged_queries_see_their_own_keys",
)
kernel(
    "triton-heads-of-a-group-are-one",
    "All query heads of a group are given the query of the first.",
    "triton decode prefill",
    r"head \* GROUP \+ row_M( % GROUP)?",
    "head * GROUP + row_M * 0",
    SHAPES + "test_line_09_group_of_seven[interpret-default]",
)
kernel(
    "triton-slot-minus-one-is-written",
    "A token whose slot is -1 is written in front of the first page.",
    "triton append",
    r"live_R = slot_R >= 0",
    "live_R = slot_R >= -1",
    ROWS + "test_append_writes_the_oracles_bytes_and_no_other",
)
kernel(
    "triton-codes-are-truncated",
    "Codes are cut towards zero instead of rounded to nearest.",
    "triton append",
    r"\(\(x \+ 12582912\.0\) - 12582912\.0\)",
    "x",
    ROWS + "test_append_writes_the_oracles_bytes_and_no_other",
)
kernel(
    "triton-nan-row-becomes-zero",
    "A row that holds NaN or inf is stored as zeros.",
    "triton append",
    r'_bad_R, float\("nan"\)',
    "_bad_R, 0.0",
    "tests/conformance/test_codecs.py::test_line_20_odd_values_are_stored_as_documented[interpret-int8-token]",
)
kernel(
    "triton-rows-gathered-into-one",
    "Gather writes all tokens of a request to its first row.",
    "triton gather",
    r"row_T = tl\.load\(kv_starts_ptr \+ b\) \+ key_T",
    "row_T = tl.load(kv_starts_ptr + b) + key_T * 0",
    ROWS + "test_gather_returns_what_is_stored_rounded_once",
)
kernel(
    "triton-scales-are-not-copied",
    "Copy leaves the scales of K behind.",
    "triton copy",
    r" *tl\.store\(k_scale_at_E[^\n]*\n",
    "",
    ROWS + "test_copy_moves_a_page_of_every_plane_and_nothing_else",
)
kernel(
    "triton-given-scale-of-the-first-head",
    "Every head of V is multiplied by the given scale of the first.",
    "triton decode prefill",
    r"tl\.load\(v_scale_ptr \+ head\)",
    "tl.load(v_scale_ptr)",
    "tests/conformance/test_formats.py::test_line_24_every_factor_applies_on_every_path",
)
kernel(
    "triton-sink-in-base-e",
    "A sink enters the merge of splits in natural units although scores are in base 2.",
    "triton decode",
    r"(sink_R = .*) \* LOG2E",
    r"\1",
    "tests/conformance/test_variants.py::test_variants_in_the_interpreter",
)
kernel(
    "triton-empty-states-are-merged",
    "Merge subtracts -inf from -inf where all states are empty.",
    "triton merge",
    r'tl\.where\(m_next == float\("-inf"\), 0\.0, m_next\)',
    "m_next",
    ROWS + "test_merge_is_right_for_empty_states_and_in_place",
)
