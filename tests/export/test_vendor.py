"""The code that goes along with an export: enough, and nothing of the compiler."""

from __future__ import annotations

import ast

from kvgen.export.vendor import modules, vendored

FRONT_END = ("kvgen.passes", "kvgen.tune", "kvgen.builder", "kvgen.export", "kvgen.commands", "kvgen.models")


def test_no_module_of_the_front_end_goes_along() -> None:
    found = modules()
    assert {"kvgen.runtime.ops", "kvgen.runtime.engine", "kvgen.backends.cpu.openmp"} <= set(found)
    assert not [name for name in found if name.startswith(FRONT_END)]


def test_every_import_of_kvgen_is_renamed() -> None:
    texts = vendored("mine", "1.0")
    for path, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                assert node.module and node.module.partition(".")[0] != "kvgen", path
            elif isinstance(node, ast.Import):
                assert not [alias for alias in node.names if alias.name.partition(".")[0] == "kvgen"], path
    assert "from mine._kvgen.errors import ArgumentError" in texts["_kvgen/runtime/ops.py"]


def test_prose_stays_as_it_is() -> None:
    assert "Built by ``kvgen.build``" not in "".join(vendored("mine", "1.0").values())
    assert "``kvgen.passes.abi``" in vendored("mine", "1.0")["_kvgen/runtime/ops.py"]
