"""Public names of arguments carry no shape suffix; the former ones are accepted, with a warning."""

from __future__ import annotations

import inspect
import re
import warnings
from typing import Any

import pytest
import torch

import kvgen.runtime
from kvgen.runtime.attend import attend
from kvgen.runtime.ops import CacheOps
from kvgen.runtime.renamed import RENAMED
from tests.runtime.test_arguments import SPEC, Batch
from tests.support.engines import library


def public_callables() -> dict[str, Any]:
    """Every public op, class and function of the runtime, and the public methods of its classes."""
    found: dict[str, Any] = {"attend": attend}
    for owner in (kvgen.runtime, CacheOps, *(getattr(kvgen.runtime, name) for name in kvgen.runtime.__all__)):
        for name, value in inspect.getmembers(owner, callable):
            if not name.startswith("_") and not inspect.isbuiltin(value):
                found[f"{getattr(owner, '__name__', '')}.{name}"] = value
    return found


def test_no_public_name_carries_a_suffix() -> None:
    seen = 0
    for name, value in public_callables().items():
        try:
            parameters = inspect.signature(value).parameters
        except ValueError:  # a class of C's
            continue
        seen += len(parameters)
        if "Step" not in name and "logits" not in str(parameters):  # what an engine and its samplers exchange
            assert not [p for p in parameters if re.search(r"_[A-Z][A-Z0-9]*$", p)], name
    assert seen > 100


def calls(b: Batch) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Each op with all of its tensors by today's names."""
    lib, tables = b.lib, {"page_table": b.table, "kv_lens": b.lens}
    attention = {"q": b.q, "cache": b.cache, **tables}
    shared = {"prefix_table": b.table[0], "prefix_len": 3}
    return {
        "append": (lib.append, {"cache": b.cache, "k": b.k, "v": b.v, "slots": b.slots}),
        "decode": (lib.decode, {**attention, "q_starts": b.starts}),
        "prefill": (lib.prefill, {**attention, "q_starts": b.starts}),
        "merge": (lib.merge, {"outs": b.outs, "lses": b.lses}),
        "gather": (lib.gather, {"cache": b.cache, **tables}),
        "workspace_bytes": (lib.workspace_bytes, {"op": "decode", **attention}),
        "cascade": (lib.cascade, attention | shared),
        "cascade_workspace_bytes": (lib.cascade_workspace_bytes, attention | shared),
    }


FORMER = {now: [old for old, new in RENAMED.items() if new == now] for now in RENAMED.values()}


def test_former_names_do_the_same_and_warn() -> None:
    for op, (call, given) in calls(Batch()).items():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            want = call(**given)
        former = {FORMER.get(name, [name])[0]: value for name, value in given.items()}
        with pytest.warns(DeprecationWarning, match="is called") as caught:
            have = call(**former)
        said = sorted(str(w.message) for w in caught)
        renamed = sorted(name for name in given if name in FORMER)
        texts = [f"{op}({FORMER[n][0]}=...): this argument is called {n} now; say {n}=" for n in renamed]
        assert said == sorted(texts)
        assert {w.filename for w in caught} == {__file__}
        flat = [torch.as_tensor(x) for x in (want if isinstance(want, tuple) else (want,)) if x is not None]
        again = [torch.as_tensor(x) for x in (have if isinstance(have, tuple) else (have,)) if x is not None]
        assert all(map(torch.equal, flat, again)), op


def test_an_argument_under_two_names_is_refused() -> None:
    b = Batch()
    where = {"page_table": b.table, "kv_lens": b.lens}
    with pytest.raises(TypeError, match="kv_lens"):
        b.lib.decode(q=b.q, cache=b.cache, **where, kv_lens_B=b.lens)
    with pytest.raises(TypeError, match="multiple values for argument 'q'"), pytest.deprecated_call():
        b.lib.decode(b.q, cache=b.cache, **where, q_BHD=b.q)
    with pytest.raises(TypeError, match="q twice"), pytest.deprecated_call():
        b.lib.decode(q_THD=b.q, q_BHD=b.q, cache=b.cache, **where)


def test_what_an_op_never_took_stays_unknown() -> None:
    b = Batch()
    for name in ("slots_T", "outs_NTHD", "window"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            b.lib.decode(b.q, b.cache, b.table, b.lens, **{name: b.slots})


def test_a_torch_compile_call_by_keywords() -> None:
    b = Batch()

    @torch.compile(fullgraph=True, backend="eager")
    def step(q: torch.Tensor) -> torch.Tensor:
        where = {"page_table": b.table, "kv_lens_B": b.lens}  # a former name too: a trace holds no warning
        out, _ = library("portable", SPEC).decode(q=q, cache=b.cache, **where)
        return out

    want, _ = b.lib.decode(b.q, b.cache, b.table, b.lens)
    assert torch.equal(step(b.q), want)
