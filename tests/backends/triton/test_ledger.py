"""No kernel of the ledger keeps registers in memory, and none has changed since it was written.

Sources are rendered anew here and compared by hash. Compiling them all takes minutes, so that is done where a
kernel changes, and its outcome is committed: ``--update-ledger`` compiles what is stale.
"""

from __future__ import annotations

import warnings
from functools import cache

import pytest

from kvgen.backends.triton.backend import TritonBackend
from kvgen.ir.plan import KernelPlan
from tests.support import ledger
from tests.support.ledger import COMMAND, REFUSED, Ledger, compiler, measure
from tests.support.ledger_list import GPUS, Subject, subjects

MOST = 2
"""Kernels of a target that a test compiles where the ledger is not fresh."""


@pytest.fixture(scope="session")
def written(request: pytest.FixtureRequest) -> Ledger:
    """The committed ledger; with ``--update-ledger`` brought up to date first."""
    found = Ledger.read()
    if request.config.getoption("--update-ledger"):
        listed, now = subjects(), compiler()
        stale = list(listed) if found.compiler != now else found.stale(listed)
        print(f"\n{len(stale)} of {len(listed)} kernels to compile", flush=True)
        fresh = measure({name: listed[name] for name in stale}, lambda text: print(text, flush=True))
        found = Ledger(now, {name: fresh.get(name) or found.entries[name] for name in listed})
        found.write()
    return found


@cache
def of(target: str) -> dict[str, Subject]:
    """What the ledger covers of a target."""
    return {name: subject for name, subject in subjects().items() if subject.target == target}


def test_the_ledger_lists_what_the_project_can_do(written: Ledger) -> None:
    listed = subjects()
    missing, gone = listed.keys() - written.entries.keys(), written.entries.keys() - listed.keys()
    assert not missing and not gone, f"missing {sorted(missing)}, left over {sorted(gone)}: {COMMAND}"


@pytest.mark.parametrize("target", GPUS)
def test_no_kernel_keeps_registers_in_memory(written: Ledger, target: str) -> None:
    """Checked on what is committed, so this compiles nothing."""
    spilled = {
        f"{name}: {kernel}": facts["spilled"]
        for name in of(target)
        for kernel, facts in written.entries[name].kernels.items()
        if facts["spilled"]
    }
    assert not spilled


def test_the_ledger_compiled_everything_that_is_not_refused(written: Ledger) -> None:
    for name, entry in written.entries.items():
        assert bool(entry.kernels) != (entry.source == REFUSED), name


@pytest.mark.parametrize("target", GPUS)
def test_sources_are_those_that_the_ledger_compiled(written: Ledger, target: str) -> None:
    listed = of(target)
    stale, other = written.stale(listed), written.compiler != compiler()
    some = stale[:MOST] or (list(listed)[:: len(listed) // MOST][:MOST] if other else [])
    for name, entry in measure({name: listed[name] for name in some}).items():
        assert not any(facts["spilled"] for facts in entry.kernels.values()), (
            f"{name} spills: {entry.kernels}"
        )
    if other:
        warnings.warn(f"the ledger was written with {written.compiler}, this is {compiler()}", stacklevel=1)
    shown = "".join(f"\n  {name}" for name in stale[:20])
    assert not stale, f"{len(stale)} kernels are not those of the ledger (compile them: {COMMAND}):{shown}"


def test_a_changed_source_is_stale_and_an_equal_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    name, subject = next(iter(of("sm_90").items()))
    source = ledger.source_of(subject)
    assert Ledger("", {name: ledger.Entry(source)}).stale({name: subject}) == []
    monkeypatch.setattr(ledger, "source_of", lambda subject: source[::-1])
    assert Ledger("", {name: ledger.Entry(source)}).stale({name: subject}) == [name]
    assert Ledger("", {}).stale({name: subject}) == [name]


def test_a_changed_comment_is_not_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, render = next(iter(of("sm_90").values())), TritonBackend.render
    source = ledger.source_of.__wrapped__(subject)

    def reworded(self: TritonBackend, plan: KernelPlan) -> str:
        heading, rest = render(self, plan).split("\n", 1)
        return f"{heading} In other words,\nsaid twice.\n{rest}\n# and a comment\n"

    def changed(self: TritonBackend, plan: KernelPlan) -> str:
        return render(self, plan) + "ONE = 1\n"

    monkeypatch.setattr(TritonBackend, "render", reworded)
    assert ledger.source_of.__wrapped__(subject) == source
    monkeypatch.setattr(TritonBackend, "render", changed)
    assert ledger.source_of.__wrapped__(subject) != source
