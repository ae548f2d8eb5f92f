"""What the ledger covers: shapes, formats, the examples and every registered variant, a new one by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgen.backends.triton.backend import TritonBackend
from kvgen.ir import Spec
from kvgen.ir.plan import KernelPlan
from kvgen.passes.abi import variants_of
from kvgen.passes.place import place
from kvgen.passes.preset import resolve
from kvgen.passes.validate import load_spec
from kvgen.targets import TARGETS
from kvgen.tune.defaults import default_schedule
from kvgen.variants import definitions, positions
from tests.support.specs import covering, fitted

GPUS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
ATTENTION = ("decode/single", "decode/multi", "prefill")

SHAPES: dict[str, tuple[Any, ...]] = {
    "head_dim": (16, 24, 64, 72, 80, 96, 112, 128, 192, (192, 128), 256, 576, (576, 512)),
    "group": (1, 4, 5, 7, 8, 16, 32, 71, 128),
    "target": GPUS,
    "kernel": ATTENTION,
    # bf16 is what most caches hold, so most rows do.
    "format": ("bf16", "bf16", "bf16", "int8-token", "int4-token", "e4m3-token"),
}
"""Factors of the covering array of shapes; a pair is (head_dim, v_head_dim)."""

PLAIN: dict[str, dict[str, Any]] = {
    "full": {"causal": False},
    "window-1": {"window": 0},
    "two terms": {"window": 512, "soft_cap": 30.0, "alibi": {"heads": 64, "offset": 32}},
    "all masks": {"window": 512, "document": True, "kv_first": True, "bool_mask": "bool"},
}
"""Combinations beside the registered definitions' own examples."""


@dataclass(frozen=True)
class Subject:
    """One compiled op."""

    kernel: str
    """``op`` or ``op/variant``."""
    spec: Spec
    target: str

    @property
    def plan(self) -> KernelPlan:
        """Its plan under the default schedule. Raises UnsupportedError for what there is none for."""
        op, _, variant = self.kernel.partition("/")
        chip, backend = TARGETS[self.target], TritonBackend()
        spec = resolve(self.spec, chip)
        schedule = default_schedule(backend, op, spec, chip, {})
        return backend.plan(op, spec, place(spec), schedule, chip, variant)


def table(fmt: str, width: int) -> dict[str, Any]:
    """The ``[cache.k]`` of a format; blocks of d are of 32 elements, as caches have them."""
    found = fitted(fmt, width)
    group = found.get("group", {})
    return found | {"group": group | {"d": 32}} if "d" in group else found


def raw_spec(name: str, fmt: str = "bf16", *, page: int = 16, alias: bool = False, **attention: Any) -> Spec:
    """The Llama shape (32 query and 8 KV heads of 128) with other keys of ``[attention]``."""
    heads = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, **attention}
    k, v = heads["head_dim"], heads.get("v_head_dim", heads["head_dim"])
    cache_table = {
        "page_size": page,
        "layout": "page head tok d" if alias else "page kv head tok d",
        "k": table(fmt, k),
        "v": {"alias": "k"} if alias else table(fmt, v),
    }
    return load_spec({"name": name, "attention": heads, "cache": cache_table})


def subjects() -> dict[str, Subject]:
    """Everything that the ledger covers, by a name that says what it is."""
    found: dict[str, Subject] = {}
    for label, kernel, spec, target in (*_formats(), *_shapes(), *_variants(), *_rotations(), *_examples()):
        found.setdefault(f"{label} {kernel} {target}", Subject(kernel, spec, target))
    return dict(sorted(found.items()))


Row = tuple[str, str, Spec, str]


def _turns() -> Iterator[str]:
    """Targets in turn."""
    while True:
        yield from GPUS


def _formats() -> Iterator[Row]:
    """The shape that most models have: bf16 on every target, the other formats in turn; the small ops too."""
    spec = raw_spec("llama")
    yield from (("llama bf16", kernel, spec, target) for kernel in ATTENTION for target in GPUS)
    turn = _turns()
    for fmt in ("int8-token", "int4-token", "e4m3-token"):
        spec = raw_spec("llama", fmt)
        yield from ((f"llama {fmt}", kernel, spec, next(turn)) for kernel in (*ATTENTION, "append", "gather"))
    for fmt in ("f32", "f16", "int8-head", "int8-block", "int4-block", "e4m3-tensor"):
        spec = raw_spec("llama", fmt, q_dtype="f16" if fmt == "f16" else "bf16")
        yield from ((f"llama {fmt}", kernel, spec, next(turn)) for kernel in ("decode/single", "prefill"))
    spec = raw_spec("llama", "int8-token", q_dtype="f32")
    yield from (("llama f32 queries", kernel, spec, next(turn)) for kernel in (*ATTENTION, "merge", "copy"))


def _shapes() -> Iterator[Row]:
    """All pairs of head dimension, group, target, kernel and format."""
    for row in covering(SHAPES):
        size, group = row["head_dim"], row["group"]
        k, v = size if isinstance(size, tuple) else (size, size)
        heads = 1 if group > 16 else 2
        label = f"{row['format']} d{k}{f'/{v}' if v != k else ''} group {group}"
        keys = {"q_heads": heads * group, "kv_heads": heads, "head_dim": k, "v_head_dim": v}
        yield label, row["kernel"], raw_spec("shape", row["format"], **keys), row["target"]


def _variants() -> Iterator[Row]:
    """Every registered mask, score and sink by its example, and some at once."""
    turn = _turns()
    listed = {definition.name: dict(definition.example) for definition in definitions()}
    for name, keys in (listed | PLAIN).items():
        spec = raw_spec("variant", **keys)
        yield from ((name, kernel, spec, next(turn)) for kernel in ATTENTION)
        if "prefix" in variants_of("decode", spec):
            yield name, "decode/prefix", spec, next(turn)
    yield "sink_logit", "merge", raw_spec("variant", sink_logit=True), "sm_90"


def _rotations() -> Iterator[Row]:
    """Keys rotated by the append or when they are read, by every scheme, both pairings, whole and in part."""
    turn = _turns()
    for kind, scheme in positions().items():
        rope = {"kind": kind, "stored": "post", **scheme.example}
        yield f"rope {kind}", "append", raw_spec("rope", rope=rope), next(turn)
    for pairing, dim, fmt in (
        ("half", 128, "bf16"),
        ("interleaved", 64, "int8-token"),
        ("half", 128, "int4-token"),
    ):
        rope = {"kind": "default", "pairing": pairing, "dim": dim}
        label = f"rope {pairing} {dim} {fmt}"
        yield label, "append", raw_spec("rope", fmt, rope={**rope, "stored": "post"}), next(turn)
        spec = raw_spec("rope", fmt, rope={**rope, "stored": "pre"})
        yield from ((label, kernel, spec, next(turn)) for kernel in ATTENTION)


def _examples() -> Iterator[Row]:
    """The specs in examples/, but for those of the first group."""
    turn = _turns()
    folder = Path(__file__).resolve().parents[2] / "examples"
    for path in sorted(folder.glob("*.toml")):
        if path.stem.startswith("llama3"):
            continue
        spec = load_spec(path)
        kernels = (*ATTENTION, "append", "gather") if spec.cache.alias else ATTENTION
        yield from ((path.stem, kernel, spec, next(turn)) for kernel in kernels)
