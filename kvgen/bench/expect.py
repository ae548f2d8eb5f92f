"""expect: what a contender must give, and how far off it may be. One that is wrong is not timed.

Two yardsticks. All outputs are compared with f32 arithmetic on the exact values. For kvgen's own formats that
leaves the room that quantising takes, so a sample of rows is also compared with the float64 oracle on what
the reference codec makes of the values: there, only rounding may differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kvgen import reference
from kvgen.bench.contender import Contender, Scene, Tensor
from kvgen.ir import Spec
from kvgen.passes.place import place
from kvgen.tune.raw_rows import raw_pool

ROUNDING = {"f32": 1e-3, "f16": 4e-3, "bf16": 1.5e-2}
"""Largest error of attention over the largest output, where only rounding to a type differs."""

ROUGH = 3e-2
"""The same added, where the query or the weights may be rounded to eight bits (``qk`` or ``pv`` = int8)."""

MOVED = {"f32": 1e-6, "f16": 1e-3, "bf16": 8e-3}
"""The same for rows that are only moved, by the type they are returned in."""

SAMPLED_ROWS, SAMPLED_TOKENS = 4, 64
"""Queries and rows of K and V that the oracle looks at."""

Arrays = dict[str, "np.ndarray[Any, np.dtype[np.float64]]"]


@dataclass(frozen=True)
class Verdict:
    """How far a contender's outputs are off."""

    error: float
    """Largest difference over the largest value expected."""
    tolerance: float
    output: str
    """Its name: ``out``, ``k`` or ``v``."""
    oracle: bool
    """Held against the oracle on stored values, not against the exact ones."""

    @property
    def what(self) -> str:
        """The output, and the yardstick."""
        return f"{self.output}, against {'the oracle' if self.oracle else 'exact values'}"

    @property
    def right(self) -> bool:
        """Whether it may be timed; NaN is wrong."""
        return self.error <= self.tolerance

    @property
    def share(self) -> float:
        """The error over what is allowed; infinite for NaN, which is wrong."""
        return float("inf") if np.isnan(self.error) else self.error / self.tolerance


class Expected:
    """The right outputs of a scene."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self._stored: dict[str, Arrays] = {}

    @cached_property
    def exact(self) -> dict[str, Tensor]:
        """All outputs in f32, from the values as they are."""
        import torch

        scene, op = self.scene, self.scene.case.op
        if op in ("decode", "prefill"):
            return {"out": _attend_all(scene)}
        found = {"k": scene.k.float(), "v": scene.v.float()}
        if op == "append":  # who cannot be read back attends over what was appended
            found["out"] = torch.stack([_appended(scene, i) for i in range(scene.case.count)])
        return found

    @cached_property
    def sample(self) -> list[int]:
        """Rows of the outputs that the oracle looks at: the first, the last, others at random."""
        total = self.scene.case.queries or self.scene.tokens
        most = SAMPLED_ROWS if self.scene.case.queries else SAMPLED_TOKENS
        drawn = np.random.default_rng(0).permutation(total)[: max(0, most - 2)]
        return sorted({0, total - 1, *map(int, drawn)})

    def oracle(self, spec: Spec, known: Mapping[str, Any], params: Mapping[str, Any]) -> Arrays:
        """The sampled rows from float64 arithmetic on the values as the spec stores them. ``known``: the
        scales and means that its cache was given."""
        key = spec.hash
        if key not in self._stored:
            if self.scene.case.op in ("decode", "prefill"):
                rows = [_attend_one(self.scene, row, spec, known, params) for row in self.sample]
                self._stored[key] = {"out": np.stack(rows)}
            else:
                self._stored[key] = self._moved(spec, known)
        return self._stored[key]

    def _moved(self, spec: Spec, known: Mapping[str, Any]) -> Arrays:
        """The sampled rows of K and V, of requests as the case has them."""
        scene = self.scene
        if spec.cache.raw is None:
            k, v = stored_values(scene.k[self.sample], scene.v[self.sample], spec, known)
            return {"k": k, "v": v}
        found = []
        for row in self.sample:
            if scene.case.op == "append":
                # The token came alone: before it lie zeros, as in a new cache.
                at = offset_of(row, spec.cache.page_size)
                k, v = (x[[row] * (at + 1)].clone() for x in (scene.k, scene.v))
                k[:at], v[:at] = 0, 0
                found.append([x[-1] for x in stored_values(k, v, spec, known)])
                continue
            end = next(end for end in scene.ends if row < end)
            first = max((e for e in scene.ends if e < end), default=0)
            k, v = stored_values(scene.k[first:end], scene.v[first:end], spec, known)
            found.append([k[row - first], v[row - first]])
        k, v = zip(*found, strict=True)
        return {"k": np.stack(k), "v": np.stack(v)}

    def judge(self, contender: Contender, turn: int) -> list[Verdict]:
        """Compare all that a contender's call, made just before, has given."""
        spec: Spec | None = getattr(contender, "spec", None)
        verdicts = []
        for name, found in contender.results(turn).items():
            tolerance = contender.tolerance
            if spec is not None and spec.cache.alias and name == "v":
                continue  # a part of k, which is looked at
            if spec is not None:
                params = getattr(contender, "params", {})
                known = {key: getattr(contender, key, {}) for key in ("scales", "means")}
                stored = self.oracle(spec, known, params)[name]
                error = _error(found[self.sample].double().numpy(), stored)
                verdicts.append(Verdict(error, tolerance, name, oracle=True))
                if self.scene.shape.options and name == "out":
                    continue  # only the oracle knows masks and scores
            exact = self.exact[name]
            if spec is not None:
                # Quantising moves outputs; by how much, the sample says.
                tolerance += 4 * _error(exact[self.sample].double().numpy(), stored)
            error = _error(found.float().numpy(), exact.numpy())
            verdicts.append(Verdict(error, tolerance, name, oracle=False))
        return verdicts


def _error(found: Any, want: Any) -> float:
    """Largest difference over the largest value wanted; infinite where shapes differ."""
    if found.shape != want.shape:
        return float("inf")
    top = float(np.abs(want).max(initial=0.0))
    return float(np.abs(found - want).max(initial=0.0)) / (top or 1.0)


def stored_values(k: Tensor, v: Tensor, spec: Spec, known: Mapping[str, Any]) -> tuple[Any, Any]:
    """One request's rows [T, kv_heads, d] as f64, after the oracle has stored and read them as the spec says.

    Neither is rotated to its position: nothing reads them back before that.
    """
    bare = dataclasses.replace(spec, attention=dataclasses.replace(spec.attention, rope=None))
    record, size, tokens = place(bare), spec.cache.page_size, len(k)
    pages = np.arange(-(-tokens // size))
    given: dict[str, Any] = {"scales": {}}
    for name, _, per_head in spec.given_scales():
        plane = name.rpartition("_")[0]
        values = np.asarray(known["scales"][plane], dtype=np.float32)
        given["scales"][plane] = values if per_head else values.reshape(())
    given["means"] = {side: np.asarray(values) for side, values in known.get("means", {}).items()}
    if spec.cache.raw is not None:
        given["raw_rows"] = pages.astype(np.int32)
    pools = reference.new_pools(record, len(pages)) | raw_pool(record, len(pages), 0)
    rows = (k.float().numpy(), None if spec.cache.alias else v.float().numpy())
    where = (bare, record, pools, len(pages))
    if spec.cache.raw is not None:
        reference.append_requests(*where, *rows, [pages], [tokens], [0, tokens], **given)
    else:
        reference.append(*where, *rows, np.arange(tokens), **given)
    (keys,), (values,) = reference.gather(*where, [pages], [tokens], **given)
    return keys, values


def _request_of(scene: Scene, row: int) -> tuple[int, int]:
    """The request that query ``row`` belongs to, and the query's place in it."""
    for request, count in enumerate(scene.case.q_lens):
        if row < count:
            return request, row
        row -= count
    raise IndexError(row)


def _attend_one(
    scene: Scene, row: int, spec: Spec, known: Mapping[str, Any], params: Mapping[str, Any]
) -> Any:
    """f64 [q_heads, v_head_dim]: one query by the oracle, over its request's keys as they are stored."""
    request, place = _request_of(scene, row)
    length, queries = scene.case.kv_lens[request], scene.case.q_lens[request]
    keys = slice(scene.ends[request] - length, scene.ends[request])
    k, v = stored_values(scene.k[keys], scene.v[keys], spec, known)
    q, (k,) = reference.scored(spec, scene.q[row : row + 1].float().numpy(), [k], params, known.get("means"))
    # The oracle sees one query, and is told which of its request's it is.
    terms = reference.Terms(spec.attention, params).at(request, row - place, (place, queries))
    out, _ = reference.attend(q, [k], [v], q_starts=[0, 1], scale=scene.shape.scale, terms=terms)
    return out[0]


def _attend_all(scene: Scene) -> Tensor:
    """f32 [queries, q_heads, v_head_dim] on the exact values, a request and a KV head at a time."""
    import torch

    shape, out, first = scene.shape, [], 0
    for request, (queries, length) in enumerate(zip(scene.case.q_lens, scene.case.kv_lens, strict=True)):
        keys = slice(scene.ends[request] - length, scene.ends[request])
        q = scene.q[first : first + queries].float().view(queries, shape.kv_heads, shape.group, -1)
        first += queries
        place = torch.arange(queries)[:, None] + (length - queries)
        key = torch.arange(length)[None, :]
        hidden = torch.zeros(queries, length, dtype=torch.bool)
        if shape.causal:
            hidden |= key > place
        if shape.window is not None:
            hidden |= key < place - shape.window
        heads = []
        for head in range(shape.kv_heads):
            scores = torch.einsum("qgd,td->gqt", q[:, head], scene.k[keys, head].float()) * shape.scale
            weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
            heads.append(torch.einsum("gqt,td->qgd", weights, scene.v[keys, head].float()))
        out.append(torch.stack(heads, 1).flatten(1, 2))
    return torch.cat(out)


def _appended(scene: Scene, token: int) -> Tensor:
    """f32 [q_heads, v_head_dim]: attention of ones over ``offset`` zero keys and the appended token."""
    import torch

    shape = scene.shape
    score = scene.k[token].float().sum(-1) * shape.scale
    weight = torch.sigmoid(score - np.log(max(offset_of(token), 1e-30)))
    return (weight[:, None] * scene.v[token].float()).repeat_interleave(shape.group, 0)


def offset_of(token: int, page_size: int = 16) -> int:
    """Where in its page the append of a case puts a token, in the first use of the page."""
    return token * 7 % min(16, page_size)
