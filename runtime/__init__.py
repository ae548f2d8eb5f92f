"""The runtime: caches and the six ops, a loader for live builds and exports alike, and batched serving.

Reading order: ``cache``, ``given`` and ``adopt`` (buffers; ``footprint``: their bytes), ``ops`` and
``attention`` (checked calls; ``quick`` repeats them, ``cascade`` joins three), ``custom_ops`` (for
torch.compile), ``manifest`` and ``loader`` (exports); then ``pool``, ``layers``, ``sequence``, ``step``,
``attend``, ``request``, ``scheduler``, ``sampling``, ``transaction`` and ``engine`` (continuous batching).
Tokens left unquantised: ``raw_append`` (and ``raw_checks``), ``raw`` (who has a raw row) and ``reopen``.
Nothing here imports the compiler, and nothing heavy is imported before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvgen.runtime.engine import Engine
    from kvgen.runtime.loader import load
    from kvgen.runtime.raw import RawRows
    from kvgen.runtime.sampling import Greedy, Sampled

__all__ = ["Engine", "Greedy", "RawRows", "Sampled", "load"]

_HOME = {
    "Engine": "engine",
    "Greedy": "sampling",
    "RawRows": "raw",
    "Sampled": "sampling",
    "load": "loader",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
