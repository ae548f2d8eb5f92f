"""A small analytic model: which candidates are worth compiling, and how GPU binaries compare.

For the CPU it only orders candidates, cheapest first, before any is compiled; the race decides. For GPUs the
compiled binary gives instructions, registers and shared memory, and the model is the judge: time per KV
token is the larger of what memory needs and what the issue slots need (design.md section 5.9), the
memory side slowed where too few bytes are in flight to cover its latency (Little's law).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvgen.ir import PageRecord, Schedule, Spec, Target
from kvgen.tune.bucket import Bucket
from kvgen.tune.space import Space

CORE_BYTES_PER_S = 8e9
"""What one CPU core reads from memory; only ratios matter."""

CORE_FLOPS = {"avx512": 60e9, "avx2": 35e9, "portable": 8e9}
"""f32 operations a second of one core in the inner kernels."""

UNIT_S, TILE_S = 4e-6, 1.5e-7
"""CPU: cost of a unit of work, and of a softmax step for one row block of one head."""

MEMORY_LATENCY_S = 7e-7
"""GPU: from a load to its data, under load."""

ISSUE_PER_CLOCK = 4
"""GPU: warp instructions a multiprocessor issues per cycle."""

REGISTERS, MAX_WARPS = 65536, 64
"""GPU: registers (32-bit) and resident warps of a multiprocessor."""


def kv_bytes(spec: Spec, record: PageRecord) -> float:
    """Bytes of cache per token."""
    return record.page_bytes() / spec.cache.page_size


def select(
    space: Space,
    default: Schedule,
    candidates: Iterable[Schedule],
    trials: int,
    cost: Mapping[Schedule, float],
) -> list[Schedule]:
    """At most ``trials`` schedules to compile, the default first.

    Half of the rest are the model's favourites, half its favourites among those that differ from the
    default in one knob: the model may be wrong about a knob, and then the neighbours show it.
    """

    def steps(schedule: Schedule) -> int:
        return sum(schedule[knob] != default[knob] for knob in space.knobs)

    ranked = sorted((s for s in candidates if s != default), key=lambda s: (cost[s], steps(s), str(s)))
    near = [s for s in ranked if steps(s) == 1]
    picked = [default]
    queues = [iter(ranked), iter(near)]
    while queues and len(picked) < trials:
        queue = queues.pop(0)
        found = next((s for s in queue if s not in picked), None)
        if found is not None:
            picked.append(found)
            queues.append(queue)
    return picked


def cpu_cost(
    op: str, spec: Spec, record: PageRecord, schedule: Schedule, target: Target, buckets: Sequence[Bucket],
    threads: int,
) -> float:  # fmt: skip
    """A figure that grows with the expected time: mean log seconds over the buckets."""
    if op not in ("decode", "prefill"):
        return 0.0
    return sum(
        math.log(_attention_s(op, spec, record, schedule, target, bucket, threads)) for bucket in buckets
    )


def _attention_s(
    op: str, spec: Spec, record: PageRecord, schedule: Schedule, target: Target, bucket: Bucket, threads: int
) -> float:
    att = spec.attention
    batch, context = bucket.sizes[0], bucket.sizes[-1]
    q_len = bucket.sizes[1] if op == "prefill" else 1
    tile, row_block = schedule.int("tile"), schedule.int("row_block")
    rows = q_len * att.q_heads
    flops = 2.0 * batch * rows * context * (att.head_dim + att.v_head_dim)
    # A wider row block reads each operand for more rows; a block wider than there are rows computes padding.
    padded = math.ceil(att.group * min(q_len, 8) / row_block) * row_block / (att.group * min(q_len, 8))
    compute = flops * padded * (1 + 1 / row_block) / CORE_FLOPS[target.arch]
    softmax = TILE_S * batch * rows / row_block * math.ceil(context / tile)
    nbytes = batch * context * kv_bytes(spec, record)
    if op == "decode":
        split, heads = max(schedule.int("split_tokens"), tile), schedule.int("heads")
        units = batch * math.ceil(context / split) * (att.kv_heads // heads)
        # Walking a page for few heads at a time comes back to it later, when it has left the cache.
        walk = 1.0 + 0.2 * (1 - heads / att.kv_heads)
    else:
        q_tile = max(1, schedule.int("rows") // att.group)
        units = batch * att.kv_heads * math.ceil(q_len / q_tile)
        walk = math.ceil(q_len / q_tile) * 0.2
    hidden = 0.6 if schedule["prefetch"] else 1.0
    memory = nbytes * walk * hidden / CORE_BYTES_PER_S
    balance = math.ceil(units / threads) * threads / units  # cores idle in the last round
    return (max(compute, memory) + 0.3 * min(compute, memory) + softmax + UNIT_S * units) * balance / threads


def gpu_cost(
    op: str, spec: Spec, record: PageRecord, schedule: Schedule, target: Target,
    kernels: Mapping[str, Mapping[str, Any]],
) -> float:  # fmt: skip
    """Predicted seconds per KV token and KV head (decode, prefill), or per row, token or element (others).

    ``kernels``: ``Kernel.resources()``: the facts of each kernel of the op.
    """
    facts = next(iter(kernels.values()))
    slots = ISSUE_PER_CLOCK * target.sms * target.clock_hz
    loop = facts.get("loop") or {}
    if op not in ("decode", "prefill") or "instr_per_token" not in loop:
        unit = next((schedule.int(k) for k in ("rows", "tile", "block") if k in schedule), 1)
        return float(
            facts["instructions"] * facts["num_warps"] / unit / slots / occupancy(facts, target) ** 0.1
        )
    per_head = kv_bytes(spec, record) / spec.attention.kv_heads
    issue = float(loop["instr_per_token"]) / slots
    # Page ids that the pipeline copies take every other stage.
    stages = schedule.int("num_stages") if schedule["ids"] == "ahead" else schedule.int("num_stages") // 2 + 1
    tokens = schedule.int("tile") * (schedule.int("unroll") if op == "decode" else 1)
    flight = stages * tokens * per_head * resident(facts, target)
    needed = target.hbm_bytes_per_s * MEMORY_LATENCY_S / target.sms
    memory = per_head / target.hbm_bytes_per_s * max(1.0, needed / flight)
    if op == "prefill":  # every tile of query rows reads the keys again, from L2 for the most part
        rows = schedule.int("rows")
        return (issue + 0.2 * memory) / rows
    # Even where memory is the limit, fewer instructions leave slots to neighbours and power to memory.
    return max(issue, memory) + 0.1 * min(issue, memory)


def resident(facts: Mapping[str, Any], target: Target) -> int:
    """Blocks that fit on a multiprocessor by registers, shared memory and warps; at least 1."""
    warps = int(facts["num_warps"])
    by_registers = REGISTERS // max(1, int(facts["registers"]) * target.warp * warps)
    by_shared = (
        target.smem_bytes // max(1, int(facts["shared_bytes"])) if facts["shared_bytes"] else MAX_WARPS
    )
    return max(1, min(by_registers, by_shared, MAX_WARPS // warps, 32))


def occupancy(facts: Mapping[str, Any], target: Target) -> float:
    """Resident warps as a share of the most there can be."""
    return resident(facts, target) * int(facts["num_warps"]) / MAX_WARPS
