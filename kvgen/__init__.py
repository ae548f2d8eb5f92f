"""kvgen: describe how a KV cache is laid out, once, and get every kernel that touches it.

>>> spec = kvgen.load_spec("examples/llama3-8b-int8.toml")
>>> lib = kvgen.build(spec, target="cpu", tune="cache")
>>> cache = lib.new_cache(num_pages=1024)
>>> lib.append(cache, k, v, slots)
>>> out, lse = lib.decode(q, cache, page_table, kv_lens)

Nothing heavy is imported before it is used: ``import kvgen`` needs neither torch nor triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgen.errors import ArgumentError, Diagnostic, KvgenError, SpecError, ToolchainError, UnsupportedError

if TYPE_CHECKING:
    from kvgen.builder import build
    from kvgen.ir import Spec
    from kvgen.library import Library
    from kvgen.passes.validate import load_spec

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "Diagnostic",
    "KvgenError",
    "Library",
    "Spec",
    "SpecError",
    "ToolchainError",
    "UnsupportedError",
    "build",
    "load_spec",
]

_LAZY = {
    "build": "kvgen.builder",
    "load_spec": "kvgen.passes.validate",
    "Library": "kvgen.library",
    "Spec": "kvgen.ir",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'kvgen' has no attribute {name!r}")
