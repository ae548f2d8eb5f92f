"""Masks: who sees whom. Query i of a request sits at position kv_len - q_len + i."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvgen.ir import Param
from kvgen.ir.plan import Constant
from kvgen.passes.fields import ATTENTION, EXPRESSION, SWITCH, Field, integer, one_of
from kvgen.variants.registry import Definition, Formula

if TYPE_CHECKING:
    from kvgen.variants.draw import Draw

OFF = "true, or leave it out"
POSITION = integer(0, 2**31 - 1)


def _fixed(formula: Formula) -> Callable[[Any, int], Formula]:
    return lambda value, q_heads: formula


def _with(name: str, text: str, doc: str) -> Callable[[Any, int], Formula]:
    return lambda value, q_heads: Formula(text, (Constant(name, value, doc),))


def _not_causal(why: str) -> Callable[[Mapping[str, Any]], str | None]:
    return lambda table: None if table.get("causal") is False else f"{why}; set causal = false"


def _some_prefix(param: Param, draw: Draw) -> Any:
    return draw.rng.integers(0, draw.kv_lens + 2)


def _some_documents(param: Param, draw: Draw) -> Any:
    import numpy as np

    starts = draw.rng.random((draw.batch, draw.kv)) < 0.1
    starts[:, 0] = True
    return np.maximum.accumulate(np.where(starts, np.arange(draw.kv), 0), axis=1)


def _some_tree(param: Param, draw: Draw) -> Any:
    """Each token sees itself and the ancestors of a random parent."""
    import numpy as np

    found = np.zeros(draw.rows, np.int64)
    for first, end in zip(draw.q_starts[:-1], draw.q_starts[1:], strict=True):
        for i in range(min(int(end - first), 64)):
            parent = int(draw.rng.integers(-1, i)) if i else -1
            seen = int(found[first + parent]) if parent >= 0 else 0
            found[first + i] = np.uint64(seen & 2**64 - 1 | 1 << i).astype(np.int64)
    return found


MASKS = (
    Definition(
        "causal",
        "mask",
        ATTENTION["causal"],
        "keys up to the query's own position",
        "Vaswani et al. 2017",
        _fixed(Formula("kv_pos <= q_pos")),
        {"causal": True},
        order=0,
        words="causal, aligned to the last key",
    ),
    Definition(
        "window",
        "mask",
        ATTENTION["window"],
        "so many earlier keys and the query's own",
        "Beltagy et al. 2020 (Longformer); Mistral",
        _with("WINDOW", "kv_pos + WINDOW >= q_pos", "earlier keys that a query sees"),
        {"causal": True, "window": 33},
        order=1,
        words="window of {value} earlier keys",
    ),
    Definition(
        "window_right",
        "mask",
        Field(POSITION, "later keys to keep, or leave it out", None),
        "so many later keys",
        "ModernBERT; FlashAttention's window_size",
        _with("WINDOW_RIGHT", "kv_pos <= q_pos + WINDOW_RIGHT", "later keys that a query sees"),
        {"causal": False, "window": 33, "window_right": 20},
        order=2,
        refuse=_not_causal("causal = true shows no later key"),
        words="window of {value} later keys",
    ),
    Definition(
        "chunk",
        "mask",
        Field(integer(1, 2**31 - 1), "positions of a chunk, or leave it out", None),
        "only keys of the query's own chunk of positions",
        "Llama 4",
        _with("CHUNK", "kv_pos // CHUNK == q_pos // CHUNK", "positions of a chunk"),
        {"causal": True, "chunk": 40},
        words="chunks of {value} positions",
    ),
    Definition(
        "prefix_lm",
        "mask",
        Field(SWITCH, OFF, None),
        "causal, but all see the first prefix_len keys",
        "Raffel et al. 2020 (T5); PaliGemma",
        _fixed(
            Formula(
                "kv_pos <= q_pos or kv_pos < prefix_len[batch]",
                params=(Param("prefix_len", ("batch",), "i32"),),
            )
        ),
        {"causal": False, "prefix_lm": True},
        refuse=_not_causal("causal = true hides later keys of the prefix"),
        sample=_some_prefix,
        words="causal after a prefix",
    ),
    Definition(
        "document",
        "mask",
        Field(SWITCH, OFF, None),
        "only keys of the query's own document; doc_start is each position's first one",
        "FlexAttention (document masking); packed sequences",
        _fixed(
            Formula(
                "doc_start[batch, kv_pos] == doc_start[batch, q_pos]",
                params=(Param("doc_start", ("batch", "kv"), "i32"),),
                # Documents follow one another: nothing before the first query's document is seen, and
                # what lies between the last query's document's start and the first query is seen by all.
                bounds={
                    "lo": "doc_start[batch, pos_first]",
                    "full_lo": "doc_start[batch, pos_last]",
                    "full_hi": "pos_first + 1",
                },
            )
        ),
        {"causal": True, "document": True},
        sample=_some_documents,
        words="documents",
    ),
    Definition(
        "tree",
        "mask",
        Field(SWITCH, OFF, None),
        "the new tokens are a tree: bit j of tree[row] shows the request's j-th new token; none past 64",
        "Miao et al. 2024 (SpecInfer); Medusa; EAGLE",
        _fixed(
            Formula(
                # The maximum keeps the shift in range where the key is no token of the tree; past its 64 bits
                # it gives the sign.
                "kv_pos < kv_len - q_len or kv_pos < kv_len - q_len + 64"
                " and (tree[q_row] >> max(kv_pos - (kv_len - q_len), 0)) & 1 == 1",
                params=(Param("tree", ("q",), "i64"),),
                bounds={"full_hi": "kv_len - q_len"},
            )
        ),
        {"causal": False, "tree": True},
        refuse=_not_causal("the tree says which of the new tokens are seen"),
        sample=_some_tree,
        words="a tree of new tokens",
    ),
    Definition(
        "bool_mask",
        "mask",
        Field(one_of("bool", "bits"), "'bool' (a byte a key) or 'bits' (eight keys a byte)", None),
        "whatever bool_mask[row, position] says",
        "FlashInfer's custom_mask and packed_custom_mask",
        lambda value, q_heads: Formula(
            "bool_mask[q_row, kv_pos]", params=(Param("bool_mask", ("q", "kv"), value),)
        ),
        {"causal": False, "bool_mask": "bits"},
        words="a mask of {value} values",
    ),
    Definition(
        "kv_first",
        "mask",
        Field(SWITCH, OFF, None),
        "keys from kv_first of the request on: earlier ones were dropped",
        "StreamingLLM; head truncation",
        _fixed(Formula("kv_pos >= kv_first[batch]", params=(Param("kv_first", ("batch",), "i32"),))),
        {"causal": True, "kv_first": True},
        sample=_some_prefix,
        words="keys from kv_first on",
    ),
    Definition(
        "mask",
        "mask",
        Field(EXPRESSION, "for example 'kv_pos <= q_pos or kv_pos < lead[batch]'", None),
        "an expression of your own (docs/variants.md)",
        "FlexAttention's mask_mod",
        lambda value, q_heads: Formula(value),
        {"causal": True, "mask": "kv_pos < 3 or q_pos - kv_pos <= 40"},
        order=60,
        words="{value}",
    ),
)
