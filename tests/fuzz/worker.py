"""worker: the process that makes the calls. It notes each call before it makes it, for it may be the last."""

from __future__ import annotations

import copy
import json
import os
import resource
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

from kvgen.export.package import export
from kvgen.library import Library
from tests.fuzz import specs, spoil
from tests.fuzz.host import HOST
from tests.fuzz.judge import Finding, judge, same
from tests.fuzz.ops import OPS
from tests.fuzz.scene import Call, Memory, Scene
from tests.support.bundle import prepare
from tests.support.engines import library
from tests.support.specs import make_spec

SCENE_CALLS = 40
"""Calls on one scene (a spec with its cache)."""


class Worker:
    """Calls number ``first``, ``first + 1``, ... of a seed; a call's number alone says what it is."""

    def __init__(self, folder: Path, seed: int, count: int) -> None:
        self.folder, self.seed = folder, seed
        self.note = os.open(folder / "note", os.O_WRONLY | os.O_CREAT)
        self.libs = [library(row, spec) for row, spec in specs.pool(count)]

    def compile(self) -> None:
        """Compile what the calls need, and export a folder."""
        by_row: dict[str, list[Library]] = {}
        for lib in self.libs[len(specs.FIRST) :]:
            by_row.setdefault(str(lib.target), []).append(lib)
        kinds = [(op, t) for op in ("append", "gather", "merge") for t in ("f32", "bf16", "f16")]
        kernels = [("copy", ""), *kinds, ("decode", "single"), ("decode", "multi"), ("prefill", "")]
        for libs in by_row.values():
            prepare([(lib, kernels) for lib in libs])
        for lib in self.libs:
            for op, variant in kernels:
                lib.kernel(op, variant)
        if not (self.folder / "export").exists():
            small = make_spec("int8-token", "f32", page_size=4, kv_heads=2, group=2, head_dim=16)
            export(small, self.folder / "export", targets=["cpu-portable"], name="small")

    def say(self, number: int, text: str) -> None:
        data = f"{number}\t{text}"[:4000].encode(errors="replace")
        os.pwrite(self.note, data.ljust(4096), 0)

    def found(self, number: int, finding: Finding) -> None:
        entry = [f"#{number} {finding.where}", finding.call, finding.what]
        with (self.folder / "found").open("a") as stream:
            stream.write(json.dumps(entry) + "\n")

    def run(self, first: int, until: float, last: int | None = None) -> int:
        """Make calls until a time (monotonic seconds) or a number; returns the next number."""
        number, scene = first, None
        while time.monotonic() < until and (last is None or number <= last):
            group, turn = divmod(number, SCENE_CALLS)
            if scene is None or turn == 0:
                scene = self.scene(group)
            self.say(number, "drawing")
            self.one(number, scene)
            number += 1
        self.say(number, "done")
        return number

    def scene(self, group: int) -> Scene:
        rng = Random(f"{self.seed}:{group}")
        return Scene(rng.choice(self.libs), rng)

    def one(self, number: int, scene: Scene) -> None:
        rng = Random(f"{self.seed}:{number}")
        if rng.random() < 0.2:
            name = rng.choice(list(HOST))
            self.judge(number, HOST[name](rng, self.folder), Memory(), name)
            return
        scene.rng, name = rng, rng.choice(list(OPS))
        torch.manual_seed(rng.randrange(2**31))
        scene.memory._bases[len(scene.slabs) :] = []
        call = OPS[name](scene)
        results = [self.judge(number, call, scene.memory, name) for _ in range(2)]
        fresh = name not in ("adopt", "new_cache") and not (name == "merge" and call.options)
        if fresh and None not in results and not same(*results):
            self.found(number, Finding(f"{name}: differs when repeated", call.name, ""))
        for _ in range(rng.choice([1, 1, 2])):
            spoiled = self.spoiled(rng, call, scene)
            for _ in range(2):
                self.judge(number, spoiled, scene.memory, spoiled.name)

    def judge(self, number: int, call: Call, memory: Memory, label: str) -> Any:
        self.say(number, label if label in call.name else call.name)
        memory.keep()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result, finding = judge(call, memory)
        memory.keep()
        if finding is not None:
            self.found(number, finding)
        return result

    def spoiled(self, rng: Random, call: Call, scene: Scene) -> Call:
        """The call with one or several arguments replaced."""
        found = copy.copy(call)
        found.args, found.options = dict(call.args), dict(call.options)
        labels, spoiled = [], set()
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            where = rng.choice([found.args, found.options]) if found.args and found.options else found.args
            where = where or found.options
            if rng.random() < 0.1 or not where:
                name, (label, value) = _keyword(rng)
                where = found.options
            else:
                name = rng.choice(list(where))
                if name in spoiled:  # what is spoiled already may end the process when it is copied
                    continue
                label, value = self.replacement(rng, name, where[name], found, scene)
            if call.signatures and label != "freed" and _hollow(value):
                value = None  # torch's dispatcher would print it, which ends the process
            where[name] = value
            spoiled.add(name)
            labels.append(f"{name}: {label}")
        if rng.random() < 0.04:
            found.around = _transform(rng, found)
            labels.append("transform")
        found.name = f"{call.name} ({'; '.join(labels)})"
        return found

    def replacement(self, rng: Random, name: str, value: Any, call: Call, scene: Scene) -> tuple[str, Any]:
        if name == "cache":
            return _cache(rng, scene, self.libs)
        if isinstance(value, tuple) and len(value) == 2:
            label, spoiled = spoil.tensor(rng, value[at := rng.randrange(2)])
            pair = (spoiled, value[1]) if at == 0 else (value[0], spoiled)
            return f"[{at}] {label}", rng.choice([pair, list(pair), spoiled, pair[:1]])
        if isinstance(value, dict) and value and name == "params" and rng.random() < 0.7:
            one = rng.choice(list(value))
            label, spoiled = spoil.tensor(rng, value[one])
            if rng.random() < 0.15:
                return f"without {one}", {key: kept for key, kept in value.items() if key != one}
            return f"[{one}] {label}", {**value, one: spoiled}
        if isinstance(value, dict):
            return "scales", {**value, rng.choice(["k", "v", "x", 5]): spoil.junk(rng)}
        if not isinstance(value, torch.Tensor):
            return "number", spoil.number(rng)
        if rng.random() < 0.2:
            return _shared(rng, value, call, scene)
        return spoil.tensor(rng, value)


def _hollow(value: Any) -> bool:
    """Whether a tensor, or one in a list, has lost its memory."""
    if isinstance(value, list):
        return any(map(_hollow, value))
    plain = type(value) is torch.Tensor and value.layout is torch.strided and not value.is_nested
    try:
        return plain and value.numel() > 0 and value.untyped_storage().nbytes() == 0
    except RuntimeError:  # a tensor of a transform
        return False


def _keyword(rng: Random) -> tuple[str, tuple[str, Any]]:
    name = rng.choice(
        [
            *("out", "lse", "scale", "params", "workspace", "num_threads", "dtype", "device", "window"),
            *("scales", "finalize", "positions"),
        ]
    )
    return name, ("new", rng.choice([spoil.junk(rng), torch.zeros(2, 2)]))


def _cache(rng: Random, scene: Scene, libs: list[Any]) -> tuple[str, Any]:
    """Another cache, or none."""
    lib = scene.lib
    how = rng.choice(["junk", "plane", "other spec", "meta", "moved", "resized", "freed", "retyped"])
    if how == "junk":
        return how, spoil.junk(rng)
    if how == "plane":
        return how, scene.cache.k
    if how == "other spec":
        other = rng.choice(libs)
        return how, Scene(other, Random(1)).cache
    if how == "meta":
        try:
            return how, lib.new_cache(3, scales=_scales(lib), device="meta")
        except (ValueError, RuntimeError):
            return "no meta", None
    planes = {
        name: plane.clone(memory_format=torch.preserve_format) for name, plane in scene.planes().items()
    }
    try:
        cache = lib.adopt(scales=_scales(lib), **planes)
    except ValueError:
        return "not cloned", None
    victim = rng.choice(list(planes.values()))
    try:
        if how == "moved":
            victim.share_memory_()
        elif how == "resized":
            victim.resize_(0)
        elif how == "freed":
            victim.untyped_storage().resize_(rng.choice([0, 64]))
        else:
            victim.set_(torch.zeros(1, dtype=victim.dtype))  # type: ignore[call-overload]
    except RuntimeError:
        return f"{how} refused", cache
    return how, cache


def _scales(lib: Any) -> Any:
    from tests.support.world import static_scales

    return static_scales(lib.spec)


def _shared(rng: Random, value: torch.Tensor, call: Call, scene: Scene) -> tuple[str, Any]:
    """A tensor of the same shape and type in the memory of another argument, or of the cache."""
    others = {**call.args, **call.options, **{f"plane {n}": p for n, p in scene.cache.planes.items()}}
    found = {n: t for n, t in others.items() if isinstance(t, torch.Tensor) and t is not value}
    if not found:
        return "nothing to share", None
    name = rng.choice(list(found))
    try:
        flat = torch.from_numpy(found[name].detach().view(torch.uint8).numpy())
        room = flat.untyped_storage().nbytes() - flat.storage_offset()
        need = value.numel() * value.itemsize
        first = flat.storage_offset() + rng.choice([0, 0, 4, 64])
        if need + first > room + flat.storage_offset():
            return f"too little in {name}", None
        base = torch.empty(0, dtype=torch.uint8).set_(flat.untyped_storage())[first : first + need]
        return f"in {name}", base.view(value.dtype).view(value.shape)
    except (RuntimeError, TypeError) as error:
        return f"cannot share {name} ({type(error).__name__})", None


def _transform(rng: Random, call: Call) -> Callable[[Callable[[], Any]], Any]:
    """Make the call with one of its tensors under ``vmap`` or ``grad``."""
    names = [name for name, value in call.args.items() if isinstance(value, torch.Tensor)]
    call.signatures = True

    def around(run: Callable[[], Any]) -> Any:
        if not names:
            return run()
        name = names[0]
        plain = call.args[name]

        def inner(x: Any) -> Any:
            call.args[name] = x
            try:
                run()
            finally:
                call.args[name] = plain
            return x

        torch.func.vmap(inner)(plain[None])
        raise TypeError("unexpected keyword argument: nothing to look at under a transform")

    return around


def main(folder: Path, seed: int, first: int, seconds: float, count: int, last: int | None) -> None:
    """Run; what was found goes to a file, and the last note says how far it came."""
    limit = 16 << 30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.set_num_threads(1)
    os.environ.setdefault("KVGEN_NUM_THREADS", "2")
    worker = Worker(folder, seed, count)
    worker.say(first, "compiling")
    worker.compile()
    until = time.monotonic() + seconds
    worker.run(first, until, last)
