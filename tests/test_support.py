"""docs/support.md says what is: it is generated anew and compared, and samples of it run."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from kvgen import support_specs
from kvgen.builder import assemble
from kvgen.errors import UnsupportedError
from kvgen.passes.fields import SWITCH, Field
from kvgen.passes.inspect import faults
from kvgen.support import Answer, Feature, answer, answers, features, page, section
from kvgen.targets import TARGETS
from kvgen.variants import Definition, Formula, registered
from tests.support.bundle import prepare
from tests.support.engines import library
from tests.support.variants import VariantCase, check_variant, wanted_kernels

ROWS = list(features())
GROUPS = list(dict.fromkeys(row.group for row in ROWS))
RUN = ("bool_mask", "score", "sink_logit", "default, interleaved, pre", "group of 7", "head_dim 72")
"""Rows that run on the CPU, and the first four interpreted: small ones of every group."""


def row_of(name: str) -> Feature:
    return next(row for row in ROWS if row.name == name)


def case_of(name: str) -> VariantCase:
    return VariantCase(row_of(name).spec, seed=1, most=40, most_q=5, batch=2)


@functools.cache
def document(root: Path) -> dict[str, str]:
    """Heading -> section of the page."""
    parts = (root / "docs/support.md").read_text().split("\n## ")
    return {part.partition("\n")[0]: f"## {part.strip()}" for part in parts[1:]}


def notes_of(root: Path) -> dict[str, int]:
    """The reasons on the page, and their numbers."""
    lines = document(root).get("Why not", "").splitlines()[2:]
    pairs = (line.partition(". ")[::2] for line in lines)
    return {text.replace("\\", ""): int(number) for number, text in pairs}


@pytest.mark.parametrize("group", GROUPS)
def test_the_page_is_what_kvgen_says(repo_root: Path, group: str) -> None:
    """Where this fails: ``python -m kvgen.support > docs/support.md``, and read what changed."""
    notes = notes_of(repo_root)
    known = len(notes)
    made = section(answers(row for row in ROWS if row.group == group), notes)
    assert made == document(repo_root)[group]
    assert len(notes) == known, "a reason that the page does not have"


def test_the_page_has_no_other_sections(repo_root: Path) -> None:
    assert [name for name in document(repo_root) if name != "Why not"] == [*GROUPS, support_specs.TITLE]
    header = document(repo_root)["Masks"].splitlines()[2]
    assert [word.strip() for word in header.split("|")[3:-1]] == list(TARGETS)


def test_what_is_refused_everywhere_is_on_the_page(repo_root: Path) -> None:
    assert support_specs.section() == document(repo_root)[support_specs.TITLE]


@functools.cache
def compile_all() -> None:
    cases = [case_of(name) for name in RUN]
    prepare((library("portable", case.spec), wanted_kernels(case)) for case in cases)


@pytest.mark.parametrize("name", RUN)
def test_samples_of_yes_run_on_the_cpu(name: str) -> None:
    assert answer(row_of(name), "cpu-portable").works
    compile_all()
    case = case_of(name)
    assert check_variant(library("portable", case.spec), case) == []


@pytest.mark.parametrize("name", RUN[:4])
def test_samples_of_yes_run_in_the_interpreter(name: str) -> None:
    assert answer(row_of(name), "interpret").works
    case = case_of(name)
    assert check_variant(library("interpret", case.spec), case) == []


def test_a_sample_of_yes_compiles_for_a_gpu() -> None:
    pytest.importorskip("triton")
    found = assemble(row_of("document").spec, "sm_90", tune="off").resources("decode")
    assert not faults("decode", found), found


def test_samples_of_no_are_refused_before_anything_is_compiled() -> None:
    refused = 0
    for row in ROWS:
        if row.group != "Formats of K and V":
            continue
        found = answer(row, "interpret")
        for op, text in found.refused.items():
            with pytest.raises(UnsupportedError) as raised:
                assemble(row.spec, "interpret").kernel(op)
            assert " ".join(str(raised.value).split()) == text
            refused += 1
    assert refused, "the page has no refusal left: take this test away"


def test_a_definition_registered_now_has_a_row() -> None:
    mask = Definition(
        "every_other",
        "mask",
        Field(SWITCH, "true, or leave it out", None),
        "every other key",
        "this test",
        lambda value, q_heads: Formula("kv_pos % 2 == 0"),
        {"every_other": True},
    )
    with registered(mask):
        row = next(row for row in features() if row.name == "every_other")
        cells = answers([row], ("cpu-portable", "sm_90"))
    assert "| every_other | decode, prefill | yes | yes |" in page(cells)


def test_what_is_refused_is_told_with_its_ops() -> None:
    row = row_of("sink_logit")
    cells = {row: {"a": Answer({"decode": "no * here"}), "b": Answer(dict.fromkeys(row.ops, "none"))}}
    text = page(cells)
    assert "| sink_logit | decode, prefill, merge | but decode: 1 | no: 2 |" in text
    assert text.endswith("## Why not\n\n1. no \\* here\n2. none\n")
