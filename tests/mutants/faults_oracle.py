"""Faults in the float64 oracle: what holds the kernels to the truth must be held itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.mutants.fault import behaviour

Plain = Callable[..., Any]
ATTEND = "tests/reference/test_attend.py::"
CODEC = "tests/reference/test_codec.py::"


@behaviour(
    "oracle-own-key-hidden",
    "A query of the oracle does not see the key at its own position.",
    "kvgen.reference.attend:visible",
    ATTEND + "test_agrees_with_one_key_at_a_time",
)
def _(plain: Plain, q_len: int, kv_len: int, **options: Any) -> Any:
    seen = plain(q_len, kv_len, **options)
    own = np.arange(q_len)[:, None] + kv_len - q_len == np.arange(kv_len)[None, :]
    return seen & ~own


@behaviour(
    "oracle-lse-in-base-e",
    "The oracle returns the logsumexp in natural units.",
    "kvgen.reference.attend:attend",
    ATTEND + "test_agrees_with_one_key_at_a_time",
)
def _(plain: Plain, *args: Any, **options: Any) -> Any:
    out, lse = plain(*args, **options)
    return out, lse * np.log(2.0)


@behaviour(
    "oracle-empty-row-of-ones",
    "A row without keys is 1 instead of 0.",
    "kvgen.reference.attend:attend",
    ATTEND + "test_fully_masked_rows",
)
def _(plain: Plain, *args: Any, **options: Any) -> Any:
    out, lse = plain(*args, **options)
    return np.where(np.isneginf(lse)[..., None], 1.0, out), lse


@behaviour(
    "oracle-merge-counts-a-state-twice",
    "The oracle merges the first state twice.",
    "kvgen.reference.attend:merge",
    ATTEND + "test_merge_of_any_split_is_the_whole",
)
def _(plain: Plain, outs: Any, lses: Any, *rest: Any) -> Any:
    return plain(np.concatenate([outs[:1], outs]), np.concatenate([lses[:1], lses]), *rest)


@behaviour(
    "oracle-sink-of-half-a-unit",
    "The oracle's sink enters in base 2.",
    "kvgen.reference.attend:add_sink",
    "tests/reference/test_terms.py::test_a_sink_takes_its_share_once",
)
def _(plain: Plain, out: Any, lse: Any, sink: Any) -> Any:
    return plain(out, lse, sink * np.log(2.0))


@behaviour(
    "oracle-bf16-truncates",
    "The oracle cuts f32 to bf16 instead of rounding.",
    "kvgen.reference.floats:f32_to_bf16",
    CODEC + "test_bf16_rounds_all_neighbours_as_torch_does",
)
def _(plain: Plain, x: Any) -> Any:
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


@behaviour(
    "oracle-hadamard-not-normalised",
    "The oracle's rotation makes rows longer.",
    "kvgen.reference.blocks:hadamard",
    "tests/reference/test_transforms.py::test_hadamard_is_the_orthonormal_matrix_and_its_own_inverse",
)
def _(plain: Plain, x: Any) -> Any:
    return plain(x) * np.float32(np.sqrt(x.shape[-1]))


@behaviour(
    "oracle-halves-swapped",
    "The oracle packs the second half of a row of int4 into the low halves of bytes.",
    "kvgen.reference.packing:pack_codes",
    "tests/reference/test_packing.py::test_each_bit_lies_where_the_format_says",
)
def _(plain: Plain, codes: Any, planes: Any) -> Any:
    half = codes.shape[-1] // 2
    return plain(np.concatenate([codes[..., half:], codes[..., :half]], -1), planes)


@behaviour(
    "oracle-codes-round-up",
    "The oracle gives halfway numbers the code above.",
    "kvgen.reference.codes:numbers_to_codes",
    "tests/reference/test_codes.py::test_numbers_become_the_nearest_code_and_ties_the_even_one",
)
def _(plain: Plain, scaled: Any, quant: Any) -> Any:
    return plain(np.nextafter(scaled, np.float32(np.inf), dtype=np.float32), quant)


@behaviour(
    "oracle-rotation-the-other-way",
    "The oracle rotates keys by minus their angles.",
    "kvgen.reference.rope:rotate",
    "tests/reference/test_terms.py::TestRope::test_turning",
)
def _(plain: Plain, x: Any, table: Any, rope: Any) -> Any:
    half = table.shape[-1] // 2
    return plain(x, np.concatenate([table[..., :half], -table[..., half:]], -1), rope)


@behaviour(
    "oracle-scale-of-128",
    "The oracle loads scales a 127th too small.",
    "kvgen.reference.scales:load_scale",
    "tests/reference/test_cache.py::test_gather_returns_what_was_appended",
)
def _(plain: Plain, stored: Any, dtype: str) -> Any:
    return plain(stored, dtype) * np.float32(126 / 127)
