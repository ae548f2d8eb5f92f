"""changes: two renderings -> what became of each kernel."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvgen.diff.trees import Key, Rendering

CHANGED, HEADER, NEW, GONE, REFUSED, SAME = "changed", "header only", "new", "gone", "refused", "unchanged"
STATUSES = (CHANGED, HEADER, NEW, GONE, REFUSED, SAME)
"""What can become of a kernel. ``header only``: the same but for its heading, which quotes hash and schedule,
and its entry's name, which is made of them. ``refused``: rendered by neither version."""

ENTRY = re.compile(r"\bkvgen_([a-z]+)_[0-9a-f]{8}")
CONTEXT = 3


@dataclass(frozen=True)
class Change:
    """One kernel in two versions."""

    spec: str
    target: str
    op: str
    """Empty where a version refused the spec as a whole."""
    variant: str
    status: str
    added: int = 0
    """Lines that only the new text has."""
    removed: int = 0
    """Lines that only the old text has."""
    diff: str = ""
    """Unified diff; empty unless both versions rendered it and differ."""
    note: str = ""
    """Why a version did not render it."""
    lines: tuple[str, ...] = ()
    """Changed lines below the heading, with names that hold hashes made equal: equal for equal changes."""

    @property
    def name(self) -> str:
        """``examples/a.toml cpu-avx2 decode single``."""
        return " ".join(filter(None, (self.spec, self.target, self.op, self.variant)))


def compare(old: Rendering, new: Rendering) -> list[Change]:
    """What became of every kernel that either version rendered or refused, in the new version's order."""
    keys = dict.fromkeys([*new.texts, *new.refused, *old.texts, *old.refused])
    order = {label: at for at, label in enumerate(dict.fromkeys(key[0] for key in keys))}
    return [_change(key, old, new) for key in sorted(keys, key=lambda key: (order[key[0]], key[1]))]


def _change(key: Key, old: Rendering, new: Rendering) -> Change:
    before, after = old.texts.get(key), new.texts.get(key)
    reasons = [_refusal(key, rendering) for rendering in (old, new)]
    if before is None or after is None:
        status = NEW if after is not None else GONE if before is not None else REFUSED
        told = [f"{when}: {why}" for when, why in zip(("before", "now"), reasons, strict=True) if why]
        if status == REFUSED and reasons[0] == reasons[1]:
            told = reasons[:1]
        return Change(*key, status, note="; ".join(told))
    if before == after:
        return Change(*key, SAME)
    hashes = {*old.hashes.get(key[0], ()), *new.hashes.get(key[0], ())}
    parts = [_split(text, hashes) for text in (before, after)]
    diff = list(
        difflib.unified_diff(before.splitlines(), after.splitlines(), *_labels(key), n=CONTEXT, lineterm="")
    )
    body = [line for line in diff[2:] if line[:1] in "+-"]
    lines = _changed_lines(parts[0][1], parts[1][1])
    return Change(
        *key,
        CHANGED if lines else HEADER,
        added=sum(line.startswith("+") for line in body),
        removed=sum(line.startswith("-") for line in body),
        diff="\n".join(diff) + "\n",
        lines=tuple(lines),
    )


def _refusal(key: Key, rendering: Rendering) -> str:
    """Why a rendering lacks a kernel: its own reason, or that of its spec."""
    label, target, _, _ = key
    return rendering.refused.get(key) or rendering.refused.get((label, target, "", ""), "")


def _labels(key: Key) -> tuple[str, str]:
    name = "/".join(filter(None, key))
    return f"a/{name}", f"b/{name}"


def _split(text: str, hashes: Iterable[str]) -> tuple[list[str], list[str]]:
    """The heading (a comment or a docstring) and the rest, with names that hold hashes made equal."""
    text = ENTRY.sub(r"kvgen_\1_entry", text)
    for found in hashes:
        text = text.replace(found, "(spec)")
    lines, end = text.splitlines(), 0
    if lines and lines[0].startswith('"""'):
        end = 1 + next((at for at, line in enumerate(lines) if at and '"""' in line), 0)
    else:
        while end < len(lines) and lines[end].startswith("//"):
            end += 1
    return lines[:end], lines[end:]


def _changed_lines(before: Sequence[str], after: Sequence[str]) -> list[str]:
    found = difflib.unified_diff(before, after, n=0, lineterm="")
    return [line for line in list(found)[2:] if line[:1] in "+-"]


def groups(changes: Iterable[Change]) -> list[list[Change]]:
    """Changed kernels, those with equal changes together, in the order of each group's first."""
    found: dict[tuple[str, ...], list[Change]] = {}
    for change in changes:
        if change.diff:
            found.setdefault(change.lines, []).append(change)
    return list(found.values())
