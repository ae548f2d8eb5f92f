"""The schedule space of a template, read from ``schedules/<template>.toml``.

[knobs]        name = [values, canonical order]
[constraints]  all = ["expression over knobs and facts", ...]
[numerics]     knobs = [...]        they decide a result's bits: one value for all workloads
[seeds.any]    knob = value         default schedule; a table named by facts, [seeds.avx512] or
                                    [seeds."avx512 int8 qk=exact"], overrides those above it where all hold
[effort.quick] trials = 12          candidates compiled; [effort.full] likewise
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import islice

from kvgen.errors import UnsupportedError
from kvgen.ir import QuantSpec, Schedule, Spec, Target
from kvgen.ir.quant import DTYPE_BYTES
from kvgen.ir.schedule import Knob
from kvgen.passes.terms import active, masking
from kvgen.tune.expression import holds
from kvgen.tune.nearest import refusal


@dataclass(frozen=True)
class Space:
    """All schedules a template can take."""

    template: str
    knobs: Mapping[str, tuple[Knob, ...]]
    constraints: tuple[str, ...]
    numerics: tuple[str, ...]
    seeds: Mapping[str, Mapping[str, Knob]]
    effort: Mapping[str, int]

    def holds(self, constraint: str, schedule: Schedule, facts: Mapping[str, Knob]) -> bool:
        """Whether one constraint holds for this schedule and these facts."""
        return holds(constraint, dict(facts) | schedule.to_dict())

    def allows(self, schedule: Schedule, facts: Mapping[str, Knob]) -> bool:
        """Whether every constraint holds for this schedule and these facts."""
        return all(self.holds(text, schedule, facts) for text in self.constraints)

    def candidates(
        self, facts: Mapping[str, Knob], pins: Mapping[str, Knob] | None = None
    ) -> Iterator[Schedule]:
        """Every schedule with these pins that the constraints allow, in canonical order."""
        fixed = pins or {}
        choices = [(fixed[knob],) if knob in fixed else found for knob, found in self.knobs.items()]
        for values in itertools.product(*choices):
            schedule = Schedule.of(dict(zip(self.knobs, values, strict=True)))
            if self.allows(schedule, facts):
                yield schedule

    def order(self, schedule: Schedule) -> tuple[int, ...]:
        """Where a schedule stands in the canonical order; a pinned value of no list is last."""
        values = ((found, schedule[knob]) for knob, found in self.knobs.items())
        return tuple(found.index(value) if value in found else len(found) for found, value in values)

    def seed(self, target: Target, facts: Mapping[str, Knob]) -> dict[str, Knob]:
        """The knobs of every seed table whose words all hold, a later one over an earlier.

        Words are ``any``, the architecture, the format of K, ``qk=`` how scores are multiplied, and ``wide``
        for heads of more than 256 elements (MLA).
        """
        words = {"any", target.arch, facts.get("k_format"), f"qk={facts.get('qk')}"}
        words |= {"wide"} if int(facts.get("head_dim", 0)) > 256 else set()
        words |= {"alias"} if facts.get("alias") else set()
        found: dict[str, Knob] = {}
        for name, knobs in self.seeds.items():
            if words.issuperset(name.split()):
                found |= knobs
        return found

    def default(
        self,
        target: Target,
        facts: Mapping[str, Knob],
        pins: Mapping[str, Knob] | None = None,
        ways: Callable[[], Iterable[str]] = tuple,
    ) -> Schedule:
        """The seed of target and facts with ``pins`` put in, or the nearest allowed schedule to it.

        Nearest changes the fewest other knobs, and those by the fewest steps. Where the pins allow
        nothing, the seed with the pins comes back for the caller to refuse; without pins,
        ``UnsupportedError`` that names the first two of ``ways``, what would fit.
        """
        pins = pins or {}
        seed = Schedule.of({**self.seed(target, facts), **pins})
        if self.allows(seed, facts):
            return seed
        for schedule in self._nearest(seed, pins):
            if self.allows(schedule, facts):
                return schedule
        if pins:
            return seed
        raise UnsupportedError(refusal(self.template, facts, tuple(islice(ways(), 2))))

    def fits(self, facts: Mapping[str, Knob]) -> bool:
        """Whether any schedule is allowed."""
        return any(True for _ in self.candidates(facts))

    def _nearest(self, seed: Schedule, pins: Mapping[str, Knob]) -> list[Schedule]:
        """Every schedule with these pins by knobs changed, then by steps, then in canonical order."""
        choices = [
            [(value, abs(i - values.index(seed[knob]))) for i, value in enumerate(values)]
            if knob not in pins
            else [(pins[knob], 0)]
            for knob, values in self.knobs.items()
        ]
        found = []
        for chosen in itertools.product(*choices):
            steps = [step for _, step in chosen]
            found.append((sum(step > 0 for step in steps), sum(steps), [value for value, _ in chosen]))
        found.sort(key=lambda each: each[:2])
        return [Schedule.of(dict(zip(self.knobs, values, strict=True))) for _, _, values in found]


FOLDERS = {"cpu": "cpp", "triton": "triton"}
"""Folder of the templates by backend."""


def space_of(op: str, target: Target) -> Space:
    """The space of an op's template for a target, without its backend: that takes long to import."""
    return load_space(f"{FOLDERS[target.backend]}/{op}")


@cache
def load_space(template: str) -> Space:
    """The space of ``templates/<template>`` (``cpp/decode``, ``triton/append``, ...)."""
    name = template.replace("/", "_") + ".toml"
    raw = tomllib.loads((resources.files("kvgen.schedules") / name).read_text(encoding="utf-8"))
    return Space(
        template=template,
        knobs={knob: tuple(values) for knob, values in raw.get("knobs", {}).items()},
        constraints=tuple(raw.get("constraints", {}).get("all", ())),
        numerics=tuple(raw.get("numerics", {}).get("knobs", ())),
        seeds=raw.get("seeds", {"any": {}}),
        effort={name: table["trials"] for name, table in raw.get("effort", {}).items()},
    )


def _widest(quant: QuantSpec) -> QuantSpec:
    """The storage of most of a row."""
    return max(quant.segments, key=lambda own: own[0])[1] if quant.segments else quant


def spec_facts(spec: Spec, target: Target) -> dict[str, Knob]:
    """The facts that constraints may name."""
    att, cache_ = spec.attention, spec.cache
    k, v = _widest(cache_.k), _widest(cache_.v)
    # Plain masks are known for what they are: sympy would cost a command that compiles nothing half its time.
    masks = masking(spec) if att.options else None
    return {
        "page_size": cache_.page_size,
        "group": att.group,
        "group_is_pow2": att.group & (att.group - 1) == 0,
        "q_heads": att.q_heads,
        "kv_heads": att.kv_heads,
        "head_dim": att.head_dim,
        "v_head_dim": att.v_head_dim,
        "alias": cache_.alias,
        "valued": not all(spec.direct(side) for side in cache_.fields),
        "levels": max(len(q.fmt.levels) for q in (k, v)),
        "turned": att.rope is not None and att.rope.stored == "pre",
        "exact_mask": masks is None or masks.exact,
        "score_by_key": any("kv_pos" in formula.text for _, formula in active(att, "score")),
        "mask_params": masks is not None and bool(masks.params),
        "token_bytes": _token_bytes(spec),
        "causal": att.causal,
        "windowed": att.window is not None,
        "dense_mask": any({"q", "kv"} <= set(param.dims) for param in att.params),
        "q_dtype": att.q_dtype,
        "k_bytes": DTYPE_BYTES[k.fmt.storage],
        "v_bytes": DTYPE_BYTES[v.fmt.storage],
        "k_format": k.format,
        "v_format": v.format,
        "k_blocks": _blocks(k, att.head_dim),
        "v_blocks": _blocks(v, att.v_head_dim),
        "qk": att.qk,
        "k_static": cache_.k.static_scale,
        "v_static": cache_.v.static_scale,
        "arch": target.arch,
        "smem_bytes": target.smem_bytes,
        "bf16_dot": "bf16" in target.features,
        "page_is_pow2": cache_.page_size & (cache_.page_size - 1) == 0,
    }


def _blocks(quant: QuantSpec, width: int) -> int:
    """Blocks of d that a kernel keeps apart: one where each element has a scale, which goes into the tile."""
    block = quant.d_block or width
    return width // block if block > 1 else 1


def _token_bytes(spec: Spec) -> int:
    """What a kernel loads for a token and head, scales left out: K, V where it is no part of K, and the
    angles of keys that are rotated when they are read."""
    att, cache_ = spec.attention, spec.cache
    found = att.head_dim * DTYPE_BYTES[cache_.k.fmt.storage]
    if not cache_.alias:
        found += att.v_head_dim * DTYPE_BYTES[cache_.v.fmt.storage]
    return found + (4 * att.rope.dim if att.rope and att.rope.stored == "pre" else 0)
