"""renamed: keywords that once carried a shape suffix (``q_BHD``), still accepted under a warning.

Names of arguments carry no suffix since then: their shapes stand in the docstrings. The code behind the ops
keeps its suffixes.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

RENAMED = {
    "q_BHD": "q",
    "q_THD": "q",
    "k_THD": "k",
    "v_THD": "v",
    "slots_T": "slots",
    "positions_T": "positions",
    "prefix_table_P": "prefix_table",
    "page_table_BP": "page_table",
    "kv_lens_B": "kv_lens",
    "q_starts_B1": "q_starts",
    "outs_NTHD": "outs",
    "lses_NTH": "lses",
}
"""Today's name of each argument by its former one."""

FORMER = frozenset(RENAMED)


def accept_former_names(op: Callable[P, R]) -> Callable[P, R]:
    """``op``, which also takes its arguments under their former names, with a ``DeprecationWarning``.

    Raises ``TypeError`` where an argument comes under both names.
    """
    own = frozenset(inspect.signature(op).parameters)

    @functools.wraps(op)
    def call(*args: P.args, **given: P.kwargs) -> R:
        # A call by today's names pays for this line only.
        if given and not FORMER.isdisjoint(given):
            given = _today(op.__name__, given, own)  # type: ignore[assignment]
        return op(*args, **given)

    return call


def _today(op: str, given: dict[str, Any], own: frozenset[str]) -> dict[str, Any]:
    """Keywords with today's names for former ones; one that ``op`` never had stays, for Python to refuse."""
    import torch

    found: dict[str, Any] = {}
    for name, value in given.items():
        now = RENAMED.get(name, name)
        if now not in own:
            now = name
        if now in found or (now != name and now in given):
            raise TypeError(f"{op}() got {now} twice: as {name}= and under another name; give {now}= alone")
        if now != name and not torch.compiler.is_compiling():  # which cannot trace a warning
            text = f"{op}({name}=...): this argument is called {now} now; say {now}="
            warnings.warn(text, DeprecationWarning, stacklevel=3)
        found[now] = value
    return found
