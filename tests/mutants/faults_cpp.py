"""Faults in the C++ of rendered kernels."""

from __future__ import annotations

from tests.mutants.fault import kernel

NUMERICS = "tests/conformance/test_numerics.py::"
SHAPES = "tests/conformance/test_shapes.py::"
TERMS = "tests/conformance/test_terms.py::"

kernel(
    "cpp-output-not-rescaled",
    "What decode summed so far is not scaled down when a larger score comes.",
    "cpp decode",
    r"load_f32\(acc \+ r \* V_PITCH \+ ([^)]*)\) \* splat\(alpha\[r\]\)",
    r"load_f32(acc + r * V_PITCH + \1)",
    SHAPES + "test_line_09_group_of_seven[portable-default]",
)
kernel(
    "cpp-weight-not-rescaled",
    "The sum of decode's weights is not scaled down when a larger score comes.",
    "cpp decode",
    r"fma\(load_f32\(l\), splat\(change\[r\]\), sum\)",
    "load_f32(l) + sum",
    SHAPES + "test_line_09_group_of_seven[portable-default]",
)
kernel(
    "cpp-one-page-for-all",
    "Decode reads the first page of a request for all its keys.",
    "cpp decode",
    r"(const int64_t page = pages)\[\(first \+ [^;]*;",
    r"\1[0];",
    SHAPES + "test_line_09_group_of_seven[portable-default]",
)
kernel(
    "cpp-keys-past-the-end",
    "Scores of keys past the end of a request keep their values.",
    "cpp decode",
    r"for \(int t = end; t < vectors \* LANES; \+\+t\) s_r\[t\] = -INFINITY;",
    "",
    NUMERICS + "test_line_02_one_key_gives_v[portable-f32]",
)
kernel(
    "cpp-empty-state-of-weight-one",
    "A row without keys leaves a logsumexp of 0 instead of -inf.",
    "cpp decode prefill",
    r"l == 0\.0f \? -INFINITY",
    "l == 0.0f ? 0.0f",
    NUMERICS + "test_line_03_fully_masked_rows[portable-prefill]",
)
kernel(
    "cpp-none-minus-none",
    "Where no key has been seen, -inf is subtracted from -inf.",
    "cpp prefill",
    r"m_new == -INFINITY \? 0\.0f : m_new",
    "m_new",
    NUMERICS + "test_line_03_fully_masked_rows[portable-prefill]",
)
kernel(
    "cpp-splits-weigh-the-same",
    "The splits of a request are merged without their weights.",
    "cpp decode",
    r"std::exp2\(state\[V_HEAD_DIM\] - base\)",
    "1.0f",
    SHAPES + "test_line_09_group_of_seven[portable-split-256]",
)
kernel(
    "cpp-split-runs-to-the-end",
    "Each split goes on to the end of the keys instead of its own.",
    "cpp decode",
    r"std::min\(r\.hi, \(r\.first_split \+ split \+ 1\) \* SPLIT\)",
    "r.hi",
    SHAPES + "test_line_09_group_of_seven[portable-split-256]",
)
kernel(
    "cpp-top-left-alignment",
    "The queries of a chunk sit on the first keys instead of the last.",
    "cpp prefill",
    r"u\.position = u\.kv_len - q_len \+ q_first;",
    "u.position = q_first;",
    SHAPES + "test_line_21_longest_query_equals_longest_request",
)
kernel(
    "cpp-decode-at-position-zero",
    "Several queries of a request in decode sit at position 0.",
    "cpp decode",
    r"r\.position = kv_len - r\.q_len;",
    "r.position = 0;",
    SHAPES + "test_line_09_group_of_seven[portable-default]",
)
kernel(
    "cpp-edge-of-the-causal-mask-dropped",
    "A tile that the last row of a block sees is taken as seen by all rows.",
    "cpp prefill",
    r"keys\.begin\[ROW_BLOCK - 1\] == 0 && keys\.end\[0\] == TILE",
    "keys.end[ROW_BLOCK - 1] == TILE",
    "tests/backends/cpu/test_prefill_tiles.py::test_empty_tiles_are_not_visited_and_whole_ones_not_masked",
)
kernel(
    "cpp-scales-of-the-first-head",
    "Decode and prefill multiply every head of K by the scales of the first.",
    "cpp decode prefill",
    r"K_SCALE_STRIDE_HEAD = \d+;",
    "K_SCALE_STRIDE_HEAD = 0;",
    "tests/conformance/test_base_grid.py::test_pairs_on_the_cpu",
)
kernel(
    "cpp-gathered-scales-of-the-first-head",
    "Gather multiplies every head of V by the scales of the first.",
    "cpp gather",
    r"V_SCALE_STRIDE_HEAD = \d+;",
    "V_SCALE_STRIDE_HEAD = 0;",
    "tests/conformance/test_base_grid.py::test_pairs_on_the_cpu[portable-0]",
)
kernel(
    "cpp-slot-minus-one-is-written",
    "A token whose slot is -1 is written in front of the first page.",
    "cpp append",
    r"if \(slot < 0\) continue;",
    "",
    "tests/conformance/test_base_grid.py::test_pairs_on_the_cpu[portable-0]",
)
kernel(
    "cpp-nan-row-becomes-zero",
    "A row that holds NaN or inf is stored as zeros.",
    "cpp append",
    r"if \(amax_bits >= 0x7f800000\) return NAN;",
    "if (amax_bits >= 0x7f800000) return 0.0f;",
    "tests/conformance/test_codecs.py::test_line_20_odd_values_are_stored_as_documented[portable-int8-token]",
)
kernel(
    "cpp-bf16-ties-go-up",
    "A number halfway between two of bf16 becomes the larger one.",
    "cpp append",
    r"bits \+ 0x7fff \+ \(bits >> 16 & 1\)",
    "bits + 0x8000",
    "tests/conformance/test_codecs.py::test_line_27_every_code_reads_back_and_ties_go_to_even[portable-bf16]",
)
kernel(
    "cpp-gather-reads-the-next-page",
    "Gather looks up the page of the token after.",
    "cpp gather",
    r"key / PAGE\]",
    "(key + 1) / PAGE]",
    "tests/backends/cpu/test_codec_rows.py::test_rows_are_the_oracles",
)
kernel(
    "cpp-empty-state-is-read",
    "Merge multiplies the rows of an empty state by zero instead of skipping them.",
    "cpp merge",
    r"if \(lse == -INFINITY\) continue;",
    "",
    "tests/conformance/test_base_grid.py::test_pairs_on_the_cpu[portable-0]",
)
kernel(
    "cpp-merged-lse-without-its-sum",
    "Merge returns the largest logsumexp of the states instead of that of all.",
    "cpp merge",
    r"top \+ std::log2\(sum\)",
    "top",
    "tests/conformance/test_base_grid.py::test_pairs_on_the_cpu[portable-0]",
)
kernel(
    "cpp-sink-in-base-e",
    "A sink enters decode in natural units although scores are in base 2.",
    "cpp decode",
    r"a\.param_sink_logit\[head\] \* LOG2E",
    "a.param_sink_logit[head]",
    "tests/conformance/test_variants.py::test_pairs_of_variants_on_the_cpu[portable-0]",
)
kernel(
    "cpp-rotation-the-other-way",
    "Keys are rotated by minus their angles while they are appended.",
    "cpp append",
    r"sine = turn\[ROPE_DIM / 2 \+ i\];",
    "sine = -turn[ROPE_DIM / 2 + i];",
    "tests/backends/cpu/test_append_rope.py::test_turned_keys_are_stored_byte_for_byte[portable-f32-f32]",
)
kernel(
    "cpp-copy-the-other-way",
    "Copy writes the pages that it should read.",
    "cpp copy",
    r"from = a\.src_pages\[pair\], to = a\.dst_pages\[pair\]",
    "from = a.dst_pages[pair], to = a.src_pages[pair]",
    "tests/runtime/test_sequence.py::test_each_of_three_holders_writes_into_its_own_copy",
)
kernel(
    "cpp-page-ids-unchecked",
    "A page id behind the last page of the pool passes the check of decode.",
    "cpp decode",
    r"pages\[p\] >= num_pages",
    "pages[p] > num_pages",
    "tests/runtime/test_quick.py::test_bad_values_are_refused",
)
