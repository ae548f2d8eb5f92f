"""check: one op of a library against the float64 oracle on the stored values, before it is ever timed.

The same code serves the tuner and ``kvgen verify``. Cases are small and hard (see ``scene``); lengths sit
on both sides of pages, tiles and splits. What is compared:

* decode, prefill: |out - oracle| relative to the largest component of sum(weight * |v|) of its row, and
  |lse - oracle| relative to max(1, |lse|), within the class of the query's type. Sums of weight * |v| are
  what rounding errors are proportional to; the output itself may cancel, max |v| would hide errors of long
  contexts. A query without keys must give exactly (0, -inf). One NaN is wrong. With ``qk = "int8"`` the
  oracle sees the rounded query; with ``pv = "int8"`` what rounding a tile's weights can cost is allowed.
* merge: likewise, within the class of its element type.
* append, copy: every byte of the buffers. gather: every byte of its outputs.
* always: nothing around an output changes, and no read-only buffer does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvgen import reference
from kvgen.ir.plan import OPS
from kvgen.library import Library
from kvgen.passes.abi import VARIANTS, check_variant
from kvgen.reference.codec import Array
from kvgen.tune import scene as scenes
from kvgen.tune.call_params import as_tensors, call_params
from kvgen.tune.check_cases import Case, attention_cases

TOLERANCE = {"f32": 1e-5, "f16": 1e-3, "bf16": 1e-2}
"""Largest relative error by class: the type of the query (decode, prefill) or of the states (merge)."""


@dataclass(frozen=True)
class Verdict:
    """What the check of one kernel found."""

    op: str
    variant: str
    ok: bool
    case: str
    """The case that failed, or the one with the largest error."""
    error: float
    """Largest relative error; for append, copy and gather the number of wrong bytes."""
    tolerance: float
    """What the error may be; 0 where bytes are compared."""
    cases: int
    """Cases that were run."""
    message: str = ""
    """What is wrong; empty when ok."""

    def __str__(self) -> str:
        name = f"{self.op}{f' ({self.variant})' if self.variant else ''}"
        if self.ok:
            return f"{name}: ok, error {self.error:.2g} of {self.tolerance:g} in {self.cases} cases"
        return f"{name}: wrong in {self.case}: {self.message}"


@dataclass(frozen=True)
class Finding:
    """One case: its name, its error, and what is wrong with it beside the error."""

    case: str
    error: float
    wrong: str = ""


def check_op(library: Library, op: str, variant: str = "", *, seed: int = 0) -> Verdict:
    """Run one kernel of ``library`` on the hard cases; stops at the first that is wrong.

    ``variant``: one of ``VARIANTS[op]``; empty means the one a library compiles first. Errors of the launch
    itself (a device that is not here, an interpreter's traceback) are raised as they come.
    """
    variant = check_variant(op, variant, library.spec)
    kind = library.spec.attention.q_dtype if op in ("decode", "prefill") else variant
    tolerance = TOLERANCE[kind] if op in ("decode", "prefill", "merge") else 0.0
    worst, count = Finding("", 0.0), 0
    for finding in _CHECKS[op](library, variant, seed):
        count += 1
        # Not "error > tolerance": a NaN must be wrong.
        if finding.wrong or not finding.error <= tolerance:
            reason = finding.wrong or f"error {finding.error:.3g}, at most {tolerance:g} is right"
            return Verdict(op, variant, False, finding.case, finding.error, tolerance, count, reason)
        if finding.error >= worst.error:
            worst = finding
    return Verdict(op, variant, True, worst.case, worst.error, tolerance, count)


def check_library(library: Library, ops: tuple[str, ...] = OPS) -> Iterator[Verdict]:
    """A verdict for every variant of every op, as ``kvgen verify`` shows them."""
    for op in ops:
        for variant in VARIANTS[op]:
            yield check_op(library, op, variant)


def _attention(op: str) -> Callable[[Library, str, int], Iterator[Finding]]:
    def run(library: Library, variant: str, seed: int) -> Iterator[Finding]:
        for case in attention_cases(library, op, variant):
            yield _attend(library, op, variant, case, seed)

    return run


def _attend(library: Library, op: str, variant: str, case: Case, seed: int) -> Finding:
    att = library.spec.attention
    scene = scenes.Scene(
        library, case.q_lens, case.kv_lens, edges=case.edges, negative=case.negative, seed=seed
    )
    cache = scene.cache()
    device, rows = cache.device, len(scene.q)
    q = scenes.padded(scene.q, att.q_dtype, device)
    out = scenes.Guarded((rows, att.q_heads, att.v_head_dim), att.q_dtype, device)
    lse = scenes.Guarded((rows, att.q_heads), "f32", device)
    table, kv_lens = scene.table(device), scenes.to_torch(np.array(case.kv_lens, np.int32), "i32", device)
    starts = None if variant == "single" else scenes.to_torch(scene.starts, "i32", device)
    before = scenes.bytes_of(cache)
    given, params = [q, cache, table, kv_lens, starts], as_tensors(scene.params, device)
    workspace = scenes.Workspace(library.workspace_bytes(op, *given, params=params), device)
    getattr(library, op)(*given, out=out.tensor, lse=lse.tensor, workspace=workspace.tensor, params=params)
    found_out, out_guard = out.read()
    found_lse, lse_guard = lse.read()
    after = scenes.bytes_of(cache)
    if any((before[name] != after[name]).any() for name in before):
        return Finding(case.name, np.inf, "it changed bytes of the cache")
    if not (out_guard and lse_guard and workspace.intact()):
        where = "out" if not out_guard else "lse" if not lse_guard else "the workspace"
        return Finding(case.name, np.inf, f"it wrote outside {where}")
    keys, values = scene.keys_and_values()
    asked, keys = reference.scored(library.spec, scene.q, keys, scene.params, scene.means)
    # One pass gives the answer and, from |v|, what its rounding errors are relative to.
    both = [np.concatenate([v, np.abs(v)], axis=-1) for v in values]
    want, want_lse = reference.attend(
        asked, keys, both, q_starts=scene.starts, scale=att.scale, terms=scene.terms
    )
    width = att.v_head_dim
    slack = _weights_slack(library, op, variant, scene) if att.pv == "int8" else 0.0
    return _compare(case.name, found_out, found_lse, want[..., :width], want[..., width:], want_lse, slack)


def _weights_slack(library: Library, op: str, variant: str, scene: scenes.Scene) -> Array:
    """f64 [T, H, D]: what rounding the weights of each tile of this kernel may cost."""
    tile = int(library.kernel(op, variant).plan.constant("TILE"))
    where = (library.spec, library.record, scene.pools, scene.num_pages, scene.pages, scene.kv_lens)
    given = (*where, scene.q, scene.starts, tile)
    return reference.weights_bound(*given, **scene.known, params=scene.params)


def _compare(
    case: str,
    out: Array,
    lse: Array,
    want: Array,
    magnitude: Array,
    want_lse: Array,
    slack: Array | float = 0.0,
) -> Finding:
    """Errors of a state [T, H, D], [T, H] against the oracle's, beyond ``slack``.

    ``magnitude`` is sum(weight * |v|).
    """
    out = reference.widen(out)
    lse = lse.astype(np.float64)
    empty = want_lse == -np.inf
    if np.isnan(out).any() or np.isnan(lse).any():
        count = int(np.isnan(out).sum() + np.isnan(lse).sum())
        return Finding(case, np.nan, f"{count} NaN leaked into out or lse")
    if (out[empty] != 0).any() or (lse[empty] != -np.inf).any():
        return Finding(case, np.inf, "a query without keys must give out = 0 and lse = -inf")
    if not want[~empty].size:
        return Finding(case, 0.0)
    top = magnitude.max(axis=-1, keepdims=True)
    beyond = np.maximum(np.abs(out - want) - slack, 0.0)
    # A sink may leave a row with next to nothing, which f32 need not hold.
    error = (beyond / np.where(top > 2.0**-100, top, 1.0))[~empty].max()
    with np.errstate(invalid="ignore"):  # -inf minus -inf, in rows that are left out
        lse_error = (np.abs(lse - want_lse) / np.maximum(1.0, np.abs(want_lse)))[~empty].max()
    return Finding(case, float(max(error, lse_error)))


MERGES = ((0, ""), (1, ""), (2, ""), (5, ""), (3, " into the first state"), (3, ": NaN in empty ones"))
"""Cases of merge: how many states, and what is special."""


def _merge(library: Library, variant: str, seed: int) -> Iterator[Finding]:
    att, rng = library.spec.attention, np.random.default_rng(seed)
    device = library.device
    rows = 2 if library.target.interpreted else 5
    every = call_params(library.spec, [1], [0, 1], rng)
    sink = every.get("sink_logit")
    params = as_tensors({"sink_logit": sink}, device) if sink is not None else None
    for states, where in MERGES:
        name = f"merge of {states} states{where}"
        outs = rng.standard_normal((states, rows, att.q_heads, att.v_head_dim)).astype(np.float32)
        lses = (rng.standard_normal((states, rows, att.q_heads)) * 4).astype(np.float32)
        if states > 1:
            lses[rng.random(lses.shape) < 0.3] = -np.inf
            lses[:, 0] = -np.inf  # nothing but empty states
            lses[:, 1] = lses[:, 1] * 1e-3 - 1e5  # far below what a finite stand-in for -inf would allow
            outs[lses == -np.inf] = np.nan if "NaN" in where else 0
        stored = reference.store_float(outs, variant)
        flat = stored.reshape(-1, att.q_heads, att.v_head_dim)
        given = scenes.padded(flat, variant, device)
        given = given.as_strided(
            stored.shape, (rows * given.stride(0), *given.stride()), given.storage_offset()
        )
        given_lse = scenes.to_torch(lses, "f32", device)
        out = scenes.Guarded(stored.shape[1:], variant, device)
        lse = scenes.Guarded(lses.shape[1:], "f32", device)
        if "first" in where:
            library.merge(given, given_lse, out=given[0], lse=given_lse[0], params=params)
            out.tensor.copy_(given[0])
            lse.tensor.copy_(given_lse[0])
        else:
            library.merge(given, given_lse, out=out.tensor, lse=lse.tensor, params=params)
        found, out_guard = out.read()
        found_lse, lse_guard = lse.read()
        if not (out_guard and lse_guard):
            yield Finding(name, np.inf, "it wrote outside out or lse")
            continue
        wide = reference.widen(stored)
        want, want_lse = reference.merge(wide, lses, sink)
        magnitude, _ = reference.merge(np.abs(wide), lses, sink)
        yield _compare(name, found, found_lse, want, magnitude, want_lse)


def _bytes(op: str) -> Callable[[Library, str, int], Iterator[Finding]]:
    def run(library: Library, variant: str, seed: int) -> Iterator[Finding]:
        from kvgen.tune import check_bytes

        for name, wrong, message in check_bytes.CHECKS[op](library, variant, seed):
            yield Finding(name, float(wrong), message)

    return run


_CHECKS: dict[str, Callable[[Library, str, int], Any]] = {
    "append": _bytes("append"),
    "decode": _attention("decode"),
    "prefill": _attention("prefill"),
    "merge": _merge,
    "copy": _bytes("copy"),
    "gather": _bytes("gather"),
}
