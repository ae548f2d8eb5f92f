"""host: calls that touch no kernel: specs, pools, sequences, engines, samplings, exported folders."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

from kvgen.builder import assemble
from kvgen.errors import ToolchainError, brief
from kvgen.ir import Spec
from kvgen.passes.validate import load_spec
from kvgen.runtime.engine import Engine
from kvgen.runtime.layers import new_layers
from kvgen.runtime.loader import load
from kvgen.runtime.pool import OutOfPages, PagePool
from kvgen.runtime.sampling import Greedy, Sampled
from kvgen.runtime.sequence import PagedSequence, PageStore
from tests.fuzz import specs, spoil
from tests.fuzz.scene import Call
from tests.support.engines import library
from tests.support.tiny_engine import check_pages
from tests.support.tiny_model import SPEC, TinyModel


def spec_of_mapping(rng: Random, folder: Path) -> Call:
    label, raw = specs.raw(rng)
    return Call(f"load_spec ({label})", load_spec, {"source": raw}, {}, _is_spec)


def spec_of_text(rng: Random, folder: Path) -> Call:
    label, data = specs.text(rng)
    path = folder / "fuzz.toml"
    path.write_bytes(data)
    return Call(f"load_spec (text {label})", load_spec, {"source": path}, {}, _is_spec)


def spec_of_anything(rng: Random, folder: Path) -> Call:
    source = rng.choice([folder, "", ".", "\0", "x" * 5000, "\ud800", "/dev/null", spoil.junk(rng)])
    return Call(f"load_spec ({type(source).__name__})", load_spec, {"source": source}, {}, _is_spec)


def _is_spec(call: Call, result: Any) -> str:
    return "" if isinstance(result, Spec) and load_spec(result.to_dict()) == result else "no spec of its own"


def build(rng: Random, folder: Path) -> Call:
    """``build`` without the compile."""
    options = {
        "target": rng.choice(["cpu", "cpu-portable", "sm_90", "interpret", "bogus", spoil.number(rng)]),
        "tune": rng.choice(["off", "off", "bogus", spoil.number(rng)]),
        "schedule": rng.choice(
            [
                None,
                {},
                {"decode": {"split_tokens": spoil.number(rng)}},
                {"decode": {rng.choice(["bogus", 5, None]): 1}},
                {rng.choice(["bogus", 5, None]): {}},
                {"decode": spoil.number(rng)},
                spoil.number(rng),
            ]
        ),
    }
    spec = rng.choice([SPEC, SPEC, specs.RAW, spoil.junk(rng)])
    shown = {name: brief(value) for name, value in options.items()}
    return Call(f"build {shown}", assemble, {"spec": spec}, options)


def who_holds(pool: PagePool) -> tuple[list[int], list[int], int, int]:
    state = pool.state()
    return state.holders.tolist(), state.ring.tolist(), state.first, state.count


def pool(rng: Random, folder: Path) -> Call:
    """Several calls of a pool, some of them nonsense; it stays whole."""
    found = PagePool(5)
    held = found.allocate(3)
    found.retain(held[:1])
    what = rng.choice(["allocate", "retain", "release", "holders", "new"])
    pages = [*rng.sample(held, rng.randrange(3)), *([spoil.number(rng)] if rng.random() < 0.7 else [])]
    value: Any = pages if what in ("retain", "release") else spoil.number(rng)
    if rng.random() < 0.2:
        value = spoil.junk(rng)
    if what == "new" and type(value) is int and value == 2**31 - 1:
        value = 9  # legal, but it takes 16 GiB
    state = who_holds(found)

    def run(given: Any) -> Any:
        return PagePool(given) if what == "new" else getattr(found, what)(given)

    def around(do: Callable[[], Any]) -> Any:
        try:
            return do()
        except OutOfPages:
            return None
        except BaseException:
            assert state == who_holds(found), "a refused call changed the pool"
            raise
        finally:
            assert found.free + found.used == found.total

    return Call(f"pool.{what} {brief(value)}", run, {"value": value}, around=around)


def sequence(rng: Random, folder: Path) -> Call:
    """Calls of a sequence."""
    store = PageStore(new_layers(library("portable", SPEC), 6, layers=2))
    parent = PagedSequence(store)
    parent.reserve(6)
    found = parent.fork() if rng.random() < 0.5 else parent
    what, value = rng.choice(["reserve", "truncate", "pages_needed"]), spoil.number(rng)
    before = found.length, found.table.tolist(), store.pool.free

    def around(do: Callable[[], Any]) -> Any:
        try:
            return do()
        except OutOfPages:
            return None
        except BaseException:
            assert before == (found.length, found.table.tolist(), store.pool.free), (
                "a refused call changed it"
            )
            raise

    return Call(f"sequence.{what} {brief(value)}", getattr(found, what), {"value": value}, around=around)


def sampling(rng: Random, folder: Path) -> Call:
    options = {
        name: spoil.number(rng) for name in ("temperature", "top_k", "top_p", "seed") if rng.random() < 0.4
    }
    shown = {name: brief(value) for name, value in options.items()}

    def run(**given: Any) -> Any:
        made = Sampled(**given)
        made.draw(torch.linspace(-1, 1, 61).numpy(), 5)
        return made

    return Call(f"Sampled {shown}", run, {}, options)


_model = TinyModel()


def engine(rng: Random, folder: Path) -> Call:
    """A request with one argument spoiled; the engine drains whatever happens."""
    found = Engine(_model, library("portable", SPEC), num_pages=9, max_batch=3, chunk=8)
    first = found.add([1, 2, 3], max_new_tokens=3)
    what = rng.choice(["add", "add", "add", "fork", "abort", "generate", "new"])
    options: dict[str, Any] = {"max_new_tokens": 4, "sampling": rng.choice([Greedy(), Sampled(seed=3)])}
    args: dict[str, Any] = {}
    if what in ("add", "generate"):
        prompt: Any = [1, 2, 3, 4, 5]
        if rng.random() < 0.5:
            prompt = rng.choice([[*prompt, spoil.number(rng)], spoil.junk(rng), torch.tensor(prompt)])
        args = {"prompt": prompt if what == "add" else rng.choice([[prompt], prompt])}
    elif what in ("fork", "abort"):
        args = {"request": rng.choice([first, spoil.number(rng)])}
    else:
        args = {"model": _model, "library": library("portable", SPEC)}
        options = {"num_pages": 4, "max_batch": 2, "chunk": 8, "scales": None}
    if what == "abort":
        options = {}
    for name in list(options):
        if rng.random() < 0.3:
            options[name] = spoil.number(rng)
    if what in ("add", "fork") and rng.random() < 0.3:
        options["stop"] = rng.choice([[spoil.number(rng)], spoil.number(rng), (1, 2)])
    if what == "generate":
        found.abort(first)

    def run(*given: Any, **keywords: Any) -> Any:
        return Engine(*given, **keywords) if what == "new" else getattr(found, what)(*given, **keywords)

    def around(do: Callable[[], Any]) -> Any:
        try:
            return do()
        finally:
            for _ in range(60):
                found.step()
                check_pages(found)
            assert found.idle, "the queue does not drain"
            assert found.store.pool.used == 0

    shown = {name: brief(value) for name, value in (args | options).items()}
    return Call(f"engine.{what} {shown}", run, args, options, around=around)


def exported(rng: Random, folder: Path) -> Call:
    """Load a copy of an exported folder that was damaged."""
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder / "export", copy)
    manifest = next(copy.rglob("manifest.json"))
    label = "junk source"
    source: Any = spoil.junk(rng)
    if rng.random() < 0.9:
        source = manifest.parent
        label = _damage(rng, manifest)
    options = {"target": spoil.number(rng)} if rng.random() < 0.1 else {}

    def check(call: Call, result: Any) -> str:
        cache = result.new_cache(4)
        att = result.spec.attention
        rows = [torch.randn(1, att.kv_heads, width) for width in (att.head_dim, att.v_head_dim)]
        result.append(cache, *rows, torch.tensor([3]))
        ids, lens = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        result.decode(torch.randn(1, att.q_heads, att.head_dim), cache, ids, lens)
        with contextlib.suppress(ToolchainError):  # it may be the file that was damaged
            result.source("decode")
        return ""

    return Call(f"load ({label})", load, {"source": source}, options, check)


def _damage(rng: Random, manifest: Path) -> str:
    """Change the manifest's values or its text, or another file."""
    how = rng.choice(["value", "value", "value", "text", "file", "drop"])
    if how == "value":
        found = json.loads(manifest.read_text())
        at, path = found, []
        while isinstance(at, dict | list) and at:
            key = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
            path.append(str(key))
            if not isinstance(at[key], dict | list) or not at[key] or rng.random() < 0.15:
                at[key] = rng.choice([None, 0, -1, 1, 2**70, "", "x", "../x", [], {}, 1.5, True, [[]]])
                break
            at = at[key]
        manifest.write_text(json.dumps(found))
        return f"{how} {'.'.join(path)}"
    path = manifest
    if how in ("file", "drop"):
        path = rng.choice([path for path in sorted(manifest.parent.rglob("*")) if path.is_file()])
    if how == "drop":
        path.unlink()
        return f"drop {path.name}"
    data, at = bytearray(path.read_bytes()), rng.randrange(path.stat().st_size + 1)
    if rng.random() < 0.5:
        data[at : at + rng.choice([1, 10_000])] = rng.choice([b"", b"\0", b"\xff", b"[" * 99_999])
    else:
        data[at : at + 1] = bytes([rng.randrange(256)])
    path.write_bytes(data)
    return f"{how} {path.name} {at}"


HOST: dict[str, Callable[[Random, Path], Call]] = {
    "spec mapping": spec_of_mapping,
    "spec text": spec_of_text,
    "spec": spec_of_anything,
    "build": build,
    "pool": pool,
    "sequence": sequence,
    "sampling": sampling,
    "engine": engine,
    "load": exported,
}
