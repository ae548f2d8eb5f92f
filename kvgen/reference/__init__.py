"""The oracle: every op of a KV cache in numpy float64, written to be read rather than to be fast.

It shares the spec, the page record and the registry of formats with the compiler and nothing else:
no symbolic address, no template, no kernel. What a kernel computes is compared with this, on the
values that are *stored*; quantisation error is a different question with a different number.
Imports neither torch nor triton. Arrays are numpy; bf16 travels as ``uint16`` (numpy has no bf16).
"""

from kvgen.reference.attend import add_sink, attend, merge
from kvgen.reference.cache import (
    append,
    append_requests,
    copy,
    decode,
    gather,
    keys_to_attend,
    prefill,
    scored,
)
from kvgen.reference.codec import (
    bf16_to_f32,
    decode_values,
    encode_rows,
    encode_static,
    f32_to_bf16,
    int8_rows,
    store_float,
    widen,
)
from kvgen.reference.layout import new_pools, pack, unpack, view
from kvgen.reference.quantised import weights_bound
from kvgen.reference.raw import reopen
from kvgen.reference.rope import rope_table, rotate
from kvgen.reference.terms import Terms

__all__ = [
    "Terms",
    "add_sink",
    "append",
    "append_requests",
    "attend",
    "bf16_to_f32",
    "copy",
    "decode",
    "decode_values",
    "encode_rows",
    "encode_static",
    "f32_to_bf16",
    "gather",
    "int8_rows",
    "keys_to_attend",
    "merge",
    "new_pools",
    "pack",
    "prefill",
    "reopen",
    "rope_table",
    "rotate",
    "scored",
    "store_float",
    "unpack",
    "view",
    "weights_bound",
    "widen",
]
