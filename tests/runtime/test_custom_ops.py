"""The ops as torch sees them: exact mutation marks, fakes, and whole graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvgen.errors import ArgumentError
from kvgen.ir import Spec
from kvgen.passes.validate import load_spec
from kvgen.runtime.custom_ops import TorchOps
from tests.support.engines import library
from tests.support.specs import make_spec

RAW = {
    "name": "raw",
    "attention": {"q_heads": 4, "kv_heads": 2, "head_dim": 32, "q_dtype": "f32"},
    "cache": {
        "page_size": 8,
        "k": {"format": "int8", "group": {"head": 1, "tok": 2}, "mean": True},
        "v": {"format": "int8", "group": {"head": 1}},
    },
}

# f32: two planes of one type in one slab; int8: four planes of two types; static: scales that no op writes;
# raw: blocks of two tokens, of which one stays open, a mean and scales.
SPECS = {
    "f32": make_spec("f32", "f32", page_size=8, kv_heads=2, group=2, head_dim=32),
    "int8": make_spec("int8-token", "int8-token", page_size=8, kv_heads=2, group=2, head_dim=32),
    "static": make_spec("int8-head", "f32", page_size=8, kv_heads=2, group=2, head_dim=32),
    "raw": load_spec(RAW),
}


class Case:
    def __init__(self, spec: Spec) -> None:
        self.lib = library("portable", spec)
        noise = torch.Generator().manual_seed(3)
        self.k, self.v = (torch.randn(3, 2, 32, generator=noise) for _ in "kv")
        self.q = torch.randn(1, 4, 32, generator=noise)
        self.slots = torch.tensor([8, 9, 10])
        self.table, self.lens = (
            torch.tensor([[1, 2]], dtype=torch.int32),
            torch.tensor([3], dtype=torch.int32),
        )
        self.starts = torch.tensor([0, 1], dtype=torch.int32)
        self.where: dict[str, Any] = {"slots": self.slots}
        if spec.cache.raw is not None:
            rows = torch.tensor([0, 3], dtype=torch.int32)
            self.where = {"page_table": self.table, "kv_lens": self.lens, "q_starts": rows}
        self.src, self.dst = torch.tensor([1], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
        self.outs, self.lses = (
            torch.randn(2, 3, 4, 32, generator=noise),
            torch.randn(2, 3, 4, generator=noise),
        )

    def cache(self) -> Any:
        sides = [side for side in "kv" if self.lib.spec.cache.quant(side).static_scale]
        means = {"k": torch.linspace(0, 1, 64).view(2, 32)} if self.lib.spec.cache.k.mean else None
        return self.lib.new_cache(8, scales={side: [0.02, 0.03] for side in sides} or None, means=means)

    def arguments(self, op: str, cache: Any) -> tuple[Any, ...]:
        planes = tuple(cache.planes.values())
        return {
            "append": (self.k, self.v, *self.where.values(), *planes),
            "decode": (self.q, *planes, self.table, self.lens),
            "prefill": (self.q, *planes, self.table, self.lens, self.starts),
            "merge": (self.outs, self.lses),
            "copy": (self.src, self.dst, *planes),
            "gather": (self.table, self.lens, *planes),
        }[op]


@pytest.mark.parametrize("op", ["append", "decode", "prefill", "merge", "copy", "gather"])
@pytest.mark.parametrize("name", SPECS)
def test_opcheck(name: str, op: str) -> None:
    case = Case(SPECS[name])
    cache = case.cache()
    found = getattr(cache.ops, op).default
    assert set(torch.library.opcheck(found, case.arguments(op, cache)).values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", SPECS)
def test_only_what_is_written_is_marked(name: str) -> None:
    case = Case(SPECS[name])
    cache = case.cache()
    stored = {plane.name for plane in (*case.lib.record.planes, *case.lib.record.raw)}
    for op in ("append", "copy", "decode", "prefill", "merge", "gather"):
        schema = getattr(cache.ops, op).default._schema
        marked = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        assert marked == (stored if op in ("append", "copy") else set())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", SPECS)
def test_a_step_compiles_whole(name: str, backend: str) -> None:
    case = Case(SPECS[name])
    lib = case.lib

    def step(cache: Any, q: Any) -> tuple[Any, ...]:
        lib.append(cache, case.k, case.v, **case.where)
        lib.copy(cache, case.src, case.dst)
        out, lse = lib.decode(q * 2, cache, case.table, case.lens)
        more, lse_more = lib.prefill(q, cache, case.table, case.lens, case.starts, scale=0.5)
        both = lib.merge(torch.stack([out, more]), torch.stack([lse, lse_more]))
        return *both, out + 1

    plain, compiled = case.cache(), case.cache()
    want = step(plain, case.q)
    torch._dynamo.reset()
    found = torch.compile(step, fullgraph=True, backend=backend)(compiled, case.q)
    assert all(torch.equal(a, b) for a, b in zip(want, found, strict=True))
    assert all(torch.equal(plain.planes[key], compiled.planes[key]) for key in plain.planes)
    assert torch.equal(compiled.planes["k"][3], compiled.planes["k"][1])
    assert compiled.planes["k"][1].any()


def test_outputs_given_under_compile() -> None:
    case = Case(SPECS["f32"])
    cache, out, lse = case.cache(), torch.empty(1, 4, 32), torch.empty(1, 4)
    case.lib.append(cache, case.k, case.v, case.slots)
    want = case.lib.decode(case.q, cache, case.table, case.lens)

    def step() -> Any:
        return case.lib.decode(case.q, cache, case.table, case.lens, out=out, lse=lse, num_threads=1)

    torch._dynamo.reset()
    torch.compile(step, fullgraph=True, backend="aot_eager")()
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])


def test_planes_of_another_owner_are_adopted() -> None:
    case = Case(SPECS["int8"])
    cache = case.cache()
    case.lib.append(cache, case.k, case.v, case.slots)
    want = case.lib.decode(case.q, cache, case.table, case.lens)
    mine = [plane.clone(memory_format=torch.preserve_format) for plane in cache.planes.values()]
    found = cache.ops.decode(case.q, *mine, case.table, case.lens)
    assert all(torch.equal(a, b) for a, b in zip(want, found, strict=True))


def test_namespaces() -> None:
    lib = library("portable", SPECS["f32"])
    first, second = TorchOps(lib, "mine"), TorchOps(lib, "mine")
    assert (first.namespace, second.namespace) == ("mine", "mine_2")
    assert first.ops is torch.ops.mine and second.ops is torch.ops.mine_2
    for name in ("a b", "é", 5):
        with pytest.raises(ArgumentError, match="give an identifier"):
            TorchOps(lib, name)  # type: ignore[arg-type]


def test_planes_of_one_buffer_compile() -> None:
    """Adopted views of one allocation, of two types: torch would refuse to mutate such aliases."""
    case = Case(SPECS["int8"])
    owner = case.cache()
    slab = owner.pools["kv"]
    record = case.lib.record
    planes = {}
    for plane in record.planes:
        flat = slab.view(owner.planes[plane.name].dtype)
        first = flat.storage_offset() + plane.offset.at(8) // plane.itemsize
        planes[plane.name] = flat.as_strided(plane.shape(8), plane.strides(8), first)
    cache = case.lib.adopt(**planes)

    def step(cache: Any, q: Any) -> Any:
        case.lib.append(cache, case.k, case.v, case.slots)
        return case.lib.decode(q * 2, cache, case.table, case.lens)[0]

    torch._dynamo.reset()
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(cache, case.q)
    assert torch.equal(found, step(cache, case.q))
    assert planes["k"][1].any() and torch.equal(planes["k"], owner.planes["k"])


def test_planes_of_one_buffer_with_a_stride_that_is_never_taken() -> None:
    case = Case(SPECS["f32"])
    owner = case.lib.new_cache(1)
    whole = owner.pools["kv"].view(torch.float32)
    planes = {}
    for plane in case.lib.record.planes:
        first = whole.storage_offset() + plane.offset.at(1) // plane.itemsize
        planes[plane.name] = whole.as_strided(plane.shape(1), (2**62, *plane.strides(1)[1:]), first)
    cache = case.lib.adopt(**planes)
    slots = torch.tensor([0, 1, 2])
    for made in (cache, owner):
        case.lib.append(made, case.k, case.v, slots)
    table = torch.zeros(1, 1, dtype=torch.int32)
    one, two = (case.lib.decode(case.q, made, table, case.lens)[0] for made in (cache, owner))
    assert torch.equal(one, two)
