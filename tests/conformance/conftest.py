"""The engines on which every line of the conformance list runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvgen.ir import Spec
from tests.support.engines import ENGINES, engine_params, library

Build = Callable[..., Any]


@pytest.fixture(params=engine_params(ENGINES))
def engine(request: pytest.FixtureRequest) -> str:
    """Name of the engine a test runs on."""
    return str(request.param)


@pytest.fixture
def build(engine: str) -> Build:
    """``build(spec, split=256)``: the engine's library, with decode cut into splits of that many tokens."""

    def made(spec: Spec, split: int | None = None) -> Any:
        return library(engine, spec, None if split is None else {"decode": {"split_tokens": split}})

    return made
