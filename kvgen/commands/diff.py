"""kvgen diff: what a change did to the generated kernels."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvgen.commands import output
from kvgen.commands.options import AsJson, OpNames, chosen_ops

if TYPE_CHECKING:
    from kvgen.diff import Change, Tree

SpecPaths = Annotated[
    list[str] | None, typer.Argument(metavar="[SPEC]...", help="Only these specs; default: all in examples/.")
]
Targets = Annotated[
    list[str] | None,
    typer.Option("--target", "-t", metavar="NAME", help="Only this target; may be repeated. Default: all."),
]
MOST_NAMES = 6
"""Kernels of an equal change that are named."""


def run(
    ref: Annotated[str, typer.Argument(metavar="GITREF", help="The old version: a commit, tag or branch.")],
    specs: SpecPaths = None,
    to: Annotated[
        str, typer.Option("--to", metavar="GITREF", help="The new version; default: the working tree.")
    ] = "",
    target: Targets = None,
    op: OpNames = None,
    stat: Annotated[bool, typer.Option("--stat", help="Which kernels changed, without their diffs.")] = False,
    fail: Annotated[bool, typer.Option("--fail", help="Exit with 1 if anything changed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show how the kernels of the example specs differ between two commits of kvgen.

    Each version renders with its own code in a process of its own, with default schedules; nothing in the
    working tree or in git's folder is touched. A change that many kernels share is shown once.

    Exits with 0 whatever it found; with --fail, with 1 if anything changed.
    """
    from kvgen.diff import commit_tree, compare, find_checkout, render_trees, working_tree
    from kvgen.diff.changes import REFUSED, SAME
    from kvgen.diff.trees import spec_files

    root = find_checkout()
    with contextlib.ExitStack() as stack:
        old = stack.enter_context(commit_tree(root, ref))
        new = stack.enter_context(commit_tree(root, to)) if to else working_tree(root)
        files = [spec_files(a, b, root, specs or []) for a, b in ((old, new), (new, old))]
        ops = chosen_ops(op) if op else ()
        changes = compare(*render_trees((old, new), files, target or (), ops))
    if as_json:
        output.print_json(_data(old, new, changes, diffs=not stat))
    else:
        _tell(old, new, changes, diffs=not stat)
    if fail and any(change.status not in (SAME, REFUSED) for change in changes):
        raise typer.Exit(1)


def _data(old: Tree, new: Tree, changes: Sequence[Change], *, diffs: bool) -> dict[str, Any]:
    fields = ("spec", "target", "op", "variant", "status", "added", "removed", "note")
    return {
        "old": {"name": old.name, "commit": old.commit},
        "new": {"name": new.name, "commit": new.commit},
        "counts": _counts(changes),
        "kernels": [
            {name: getattr(change, name) for name in fields} | ({"diff": change.diff} if diffs else {})
            for change in changes
        ],
    }


def _counts(changes: Sequence[Change]) -> dict[str, int]:
    from kvgen.diff.changes import STATUSES

    found = Counter(change.status for change in changes)
    return {status: found[status] for status in STATUSES}


def _tell(old: Tree, new: Tree, changes: Sequence[Change], *, diffs: bool) -> None:
    """Diffs, or the kernels that changed; then a row for each spec and target; then the sum."""
    if diffs:
        _print_diffs(changes)
    else:
        _print_changed(changes)
    columns = [name for name, count in _counts(changes).items() if count]
    rows = [(*place, *(counts[name] for name in columns)) for place, counts in _places(changes)]
    title = f"Kernels, {_named(old)} to {_named(new)}"
    output.table(("spec", "targets", *columns), rows, title=title, right=columns)
    total = ", ".join(f"{count} {name}" for name, count in _counts(changes).items() if count)
    output.line(total or "no kernels")


def _places(changes: Sequence[Change]) -> list[tuple[tuple[str, str], dict[str, int]]]:
    """((spec, its targets of equal counts), those counts of each target)."""
    by_target: dict[tuple[str, str], list[Change]] = {}
    for change in changes:
        by_target.setdefault((change.spec, change.target), []).append(change)
    alike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for (spec, target), found in by_target.items():
        alike.setdefault((spec, tuple(_counts(found).values())), []).append(target)
    return [
        ((spec, ", ".join(targets)), dict(zip(_counts(()), counts, strict=True)))
        for (spec, counts), targets in alike.items()
    ]


def _named(tree: Tree) -> str:
    return f"{tree.name} ({tree.commit[:8] or 'no commit'})"


def _print_diffs(changes: Sequence[Change]) -> None:
    from kvgen.diff import groups

    for found in groups(changes):
        output.code(found[0].diff, "diff")
        if others := found[1:]:
            more = f" and {len(others) - MOST_NAMES} more" if len(others) > MOST_NAMES else ""
            names = "; ".join(change.name for change in others[:MOST_NAMES])
            output.line(f"(the same change, but for headings, in {names}{more})")
        output.line()


def _print_changed(changes: Sequence[Change]) -> None:
    from kvgen.diff.changes import CHANGED, HEADER, REFUSED

    # The table below counts those that only one version has, or none; the first are named where it says why.
    rows = [
        (change.name, change.status, change.added, change.removed, " ".join(change.note.split()))
        for change in changes
        if change.status in (CHANGED, HEADER) or (change.note and change.status != REFUSED)
    ]
    if rows:
        columns = ("kernel", "what", "+", "-", "why")
        output.table(columns, rows, title="Not as they were", right=("+", "-"))
