"""ops: right calls of a library's ops, of its custom ops, and of what makes caches."""

from __future__ import annotations

from typing import Any

import torch

from kvgen.runtime.cache import torch_dtype
from tests.fuzz.scene import Call, Scene
from tests.support.world import static_scales

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def shapes(result: Any, *want: tuple[Any, ...]) -> str:
    """What is wrong with a pair of tensors; nothing where shapes and types are as wanted."""
    if not isinstance(result, tuple) or len(result) != len(want):
        return f"returned {type(result).__name__}"
    for tensor, (dtype, *shape) in zip(result, want, strict=True):
        if tensor.dtype != dtype or list(tensor.shape) != shape:
            return f"returned {tensor.dtype} {tuple(tensor.shape)} instead of {dtype} {shape}"
    return ""


def attended(scene: Scene) -> Any:
    def check(call: Call, result: Any) -> str:
        att, rows = scene.att, call.args["q"].shape[0]
        for name, made in zip(("out", "lse"), result, strict=True):
            if call.options.get(name) is not None and call.options[name] is not made:
                return f"{name} is not what was given"
        dtype = torch_dtype(att.q_dtype)
        want = (dtype, rows, att.q_heads, att.v_head_dim), (torch.float32, rows, att.q_heads)
        return shapes(result, *want)

    return check


def given(call: Call) -> list[Any]:
    """Outputs and workspace that a caller gave."""
    return [call.options.get(name) for name in ("out", "lse", "workspace")]


def attention(scene: Scene, op: str, *, custom: bool = False) -> Call:
    """A decode or a prefill."""
    rng, att = scene.rng, scene.att
    table, lens, counts = scene.batch()
    multi = op == "prefill" or rng.random() < 0.4
    rows = [rng.choice([0, 1, 2, 5]) if multi else 1 for _ in counts]
    total = sum(rows)
    q = scene.floats(total, att.q_heads, att.head_dim, dtype=torch_dtype(att.q_dtype))
    starts = [0, *torch.tensor(rows, dtype=torch.int64).cumsum(0).tolist()]
    args: dict[str, Any] = {"q": q, "cache": scene.cache, "table": table, "lens": lens}
    params = scene.params(counts, [int(start) for start in starts])
    if custom:
        args |= {f"param {name}": params[name] for name in sorted(params, key=wanted(scene).index)}
    if multi:
        args["starts"] = scene.ints([int(start) for start in starts])
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        options["scale"] = rng.choice([0.5, 1, None])
    if rng.random() < 0.7:
        options["num_threads"] = rng.choice([1, 2])
    if custom:
        args = spread(scene, args)
        return Call(
            f"ops.{op}", getattr(scene.cache.ops, op), args, options, attended(scene), signatures=True
        )
    options |= scene.outputs(total)
    given_params = {"params": params} if params else {}
    if rng.random() < 0.2 and total:
        threads = options.get("num_threads")
        need = scene.lib.workspace_bytes(op, *args.values(), num_threads=threads, **given_params)
        options["workspace"] = torch.empty(need + 64, dtype=torch.uint8)
    options |= given_params
    if rng.random() < 0.1 and not params:
        options["params"] = rng.choice([None, {}])
    if rng.random() < 0.2:
        options["finalize"] = rng.choice([True, False])
    return Call(op, getattr(scene.lib, op), args, options, attended(scene), given)


def wanted(scene: Scene) -> list[str]:
    """Names of the parameters that decode and prefill read, in the order of the custom ops."""
    return [param.name for param in scene.lib._wanted]


def spread(scene: Scene, args: dict[str, Any]) -> dict[str, Any]:
    """The planes in the place of the cache."""
    found = {}
    for name, value in args.items():
        planes = {f"plane_{key}": plane for key, plane in scene.cache.planes.items()}
        found |= planes if name == "cache" else {name: value}
    return found


def workspace_bytes(scene: Scene) -> Call:
    op = scene.rng.choice(["decode", "prefill"])
    call = attention(scene, op)
    kept = {name: value for name, value in call.options.items() if name in ("num_threads", "params")}
    return Call(
        "workspace_bytes",
        scene.lib.workspace_bytes,
        {"op": op, **call.args},
        kept,
        lambda call, result: "" if type(result) is int and result >= 0 else f"returned {result!r}",
    )


def append(scene: Scene, *, custom: bool = False) -> Call:
    rng, att = scene.rng, scene.att
    count = rng.choice([0, 1, 3, 5])
    slots = rng.sample(range(-1, scene.cache.capacity), min(count, scene.cache.capacity))
    dtype = rng.choice(FLOATS)
    k, v = (scene.floats(len(slots), att.kv_heads, w, dtype=dtype) for w in (att.head_dim, att.v_head_dim))
    args: dict[str, Any] = {"k": k, "v": v, "slots": scene.ints(slots, torch.int64)}
    if scene.spec.cache.alias:
        args |= {"v": None}
    turning: dict[str, Any] = {}
    if scene.lib._turns:
        args["positions"] = scene.ints([rng.randrange(9) for _ in slots])
        turning = {"rope_table": scene.angles(9)}
    if custom:
        order = {name: value for name, value in {**args, **turning, "cache": 0}.items() if value is not None}
        return _writing(scene, "append", {}, order, custom)
    options = {"params": turning} if turning else {}
    return _writing(scene, "append", {"cache": scene.cache, **args}, {}, custom, options)


def copy(scene: Scene, *, custom: bool = False) -> Call:
    rng = scene.rng
    pages = rng.sample(range(scene.cache.num_pages), 4)
    count = rng.choice([0, 1, 2])
    args = {"src": scene.ints(pages[:count]), "dst": scene.ints(pages[2 : 2 + count])}
    return _writing(scene, "copy", {"cache": scene.cache, **args}, {**args, "cache": 0}, custom)


def _writing(scene: Scene, op: str, args: Any, order: Any, custom: bool, options: Any = None) -> Call:
    def check(call: Call, result: Any) -> str:
        return "" if result is None else f"returned {result!r}"

    slabs = list(scene.slabs)
    if custom:
        run, args = getattr(scene.cache.ops, op), spread(scene, order)
        return Call(f"ops.{op}", run, args, {}, check, lambda call: slabs, signatures=True)
    return Call(op, getattr(scene.lib, op), args, options or {}, check, lambda call: slabs)


def merge(scene: Scene, *, custom: bool = False) -> Call:
    rng, att = scene.rng, scene.att
    states, rows, dtype = rng.choice([0, 1, 2, 3]), rng.choice([0, 1, 3]), rng.choice(FLOATS)
    outs = scene.floats(states, rows, att.q_heads, att.v_head_dim, dtype=dtype)
    lses = scene.floats(states, rows, att.q_heads)
    args: dict[str, Any] = {"outs": outs, "lses": lses}

    def check(call: Call, result: Any) -> str:
        outs = call.args["outs"]
        _, rows, heads, _ = outs.shape
        return shapes(result, (outs.dtype, *outs.shape[1:]), (torch.float32, rows, heads))

    sink = {"sink_logit": scene.floats(att.q_heads)} if att.sink else {}
    if custom:
        return Call("ops.merge", scene.cache.ops.merge, {**args, **sink}, {}, check, signatures=True)
    options: dict[str, Any] = {"params": sink} if sink else {}
    if rng.random() < 0.4:
        place = outs[0] if states and rng.random() < 0.5 else scene.floats(*outs.shape[1:], dtype=dtype)
        options["out"] = place
    if rng.random() < 0.4:
        options["lse"] = lses[0] if states and rng.random() < 0.5 else scene.floats(*lses.shape[1:])
    return Call("merge", scene.lib.merge, args, options, check, given)


def gather(scene: Scene, *, custom: bool = False) -> Call:
    rng, att = scene.rng, scene.att
    table, lens, counts = scene.batch()
    args = {"cache": scene.cache, "table": table, "lens": lens}
    dtype = rng.choice(FLOATS)
    widths = att.head_dim, att.v_head_dim

    def check(call: Call, result: Any) -> str:
        total, out = int(call.args["lens"].sum()), call.options.get("out")
        kind = call.options.get("dtype") or (torch_dtype(att.q_dtype) if out is None else out[0].dtype)
        return shapes(result, *((kind, total, att.kv_heads, width) for width in widths))

    if custom:
        order = spread(scene, {"table": table, "lens": lens, "cache": 0})
        return Call("ops.gather", scene.cache.ops.gather, order, {}, check, signatures=True)
    options: dict[str, Any] = {"dtype": dtype} if rng.random() < 0.4 else {}
    if rng.random() < 0.5 and not scene.spec.cache.alias:
        kind = options.get("dtype", torch_dtype(att.q_dtype))
        options["out"] = tuple(scene.floats(sum(counts), att.kv_heads, w, dtype=kind) for w in widths)
    return Call(
        "gather", scene.lib.gather, args, options, check, lambda call: list(call.options.get("out") or ())
    )


def adopt(scene: Scene) -> Call:
    """Planes to adopt, now and then with steps between pages that are wider than need be."""
    planes = scene.planes()
    if scene.rng.random() < 0.3:
        planes = {name: _spaced(scene, name, plane) for name, plane in planes.items()}
    options = {**planes, "scales": static_scales(scene.spec)}
    return Call("adopt", scene.lib.adopt, {}, options, used(scene), lambda call: [])


def used(scene: Scene) -> Any:
    """Use a cache that was accepted; its memory need not be kept apart any more."""

    def check(call: Call, result: Any) -> str:
        lib, att = scene.lib, scene.att
        if result.device.type != "cpu":
            return f"accepted on {result.device}"
        widths = att.head_dim, att.v_head_dim
        rows: list[Any] = [torch.randn(2, att.kv_heads, width) for width in widths]
        last = result.capacity - 1
        ids = torch.tensor([[0, result.num_pages - 1]], dtype=torch.int32)
        lens = torch.tensor([2 * scene.page], dtype=torch.int32)
        q = torch.randn(1, att.q_heads, att.head_dim).to(torch_dtype(att.q_dtype))
        if scene.spec.cache.alias:
            rows[1] = None
        turning: dict[str, Any] = {}
        if lib._turns:
            turning = {"positions": scene.ints([0, 1]), "params": {"rope_table": scene.angles(2)}}
        params = scene.params([2 * scene.page], [0, 1]) or None
        for _ in range(2):
            lib.append(result, *rows, torch.tensor([0, last or -1]), **turning)
            lib.decode(q, result, ids, lens, params=params)
            lib.prefill(q, result, ids, lens, torch.tensor([0, 1], dtype=torch.int32), params=params)
        lib.gather(result, ids, lens)
        if result.num_pages > 1:
            lib.copy(result, ids[0, :1], ids[0, 1:])
        scene.memory.keep()
        return ""

    return check


def _spaced(scene: Scene, name: str, plane: torch.Tensor) -> torch.Tensor:
    """The plane in memory of its own where the axes outside a page have any strides that fit."""
    placed = scene.lib.record.plane(name)
    inside = placed.span() // placed.itemsize
    steps, reach = list(plane.stride()), inside
    outer = [at for at, axis in enumerate(placed.axes) if not axis.constant]
    scene.rng.shuffle(outer)
    for at in outer:
        steps[at] = reach + scene.rng.choice([0, 1, 3, 64])
        reach = steps[at] * plane.shape[at]
    return scene.memory.place(torch.zeros(reach, dtype=plane.dtype)).as_strided(plane.shape, steps)


def new_cache(scene: Scene) -> Call:
    options = {"scales": static_scales(scene.spec), "layers": scene.rng.choice([1, 2])}
    return Call("new_cache", scene.lib.new_cache, {"num_pages": 3}, options, used(scene))


OPS = {
    "decode": lambda s: attention(s, "decode"),
    "prefill": lambda s: attention(s, "prefill"),
    "append": append,
    "copy": copy,
    "merge": merge,
    "gather": gather,
    "workspace_bytes": workspace_bytes,
    "adopt": adopt,
    "new_cache": new_cache,
    "ops.decode": lambda s: attention(s, "decode", custom=True),
    "ops.prefill": lambda s: attention(s, "prefill", custom=True),
    "ops.append": lambda s: append(s, custom=True),
    "ops.copy": lambda s: copy(s, custom=True),
    "ops.merge": lambda s: merge(s, custom=True),
    "ops.gather": lambda s: gather(s, custom=True),
}
