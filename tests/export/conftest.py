"""One small export for all tests of this folder; a test that spoils it takes a copy."""

from __future__ import annotations

import pytest

from kvgen.export.package import Package, export
from tests.support.specs import make_spec

SPEC = make_spec("int8-token", "f32", page_size=4, kv_heads=2, group=2, head_dim=16)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return export(SPEC, tmp_path_factory.mktemp("export") / "out", targets=["cpu-portable"], name="small")
