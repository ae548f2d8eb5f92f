"""Checkpoints for the tests of real models, which need the extra ``models``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvgen.models.threads import using_threads
from tests.support.checkpoints import FAMILY_SHAPES, SHAPES, make_checkpoint

Checkpoint = Callable[[str], Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The folder of a shape's or a family's checkpoint, made once. Do not write into it."""
    pytest.importorskip("transformers")
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            family = {"family": name} if name in FAMILY_SHAPES else {}
            changes = FAMILY_SHAPES.get(name) or SHAPES[name]
            made[name] = make_checkpoint(folder, tokenizer=name == "gqa-tied", **family, **changes)
        return made[name]

    return find


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models lose more time to threads that wait for each other than they win."""
    with using_threads(1):
        yield
