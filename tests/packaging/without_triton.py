"""Runs in an environment without Triton: CPU kernels, tuner, engine and export; what needs Triton says so.

Arguments: a folder for the export.
"""

import importlib.util
import sys
import warnings

import torch

import kvgen
from kvgen.errors import ToolchainError
from kvgen.export.package import default_targets, export
from kvgen.runtime import Engine, load
from kvgen.tune.tuner import tune
from tests.export.conftest import SPEC
from tests.support.tiny_model import TinyModel, prompts

warnings.simplefilter("ignore")
assert importlib.util.find_spec("triton") is None

lib = kvgen.build(SPEC, "cpu-portable", tune="off")
cache, rows = lib.new_cache(4), torch.ones(5, 2, 16)
lib.append(cache, rows, rows, torch.arange(5))
out, lse = lib.decode(torch.ones(1, 4, 16), cache, torch.tensor([[0, 1]]).int(), torch.tensor([5]).int())
assert torch.allclose(out, torch.ones_like(out))

made = export(SPEC, sys.argv[1], targets=["cpu-portable"], name="lean")
tokens = []
for served in (lib, load(made.folder / made.name)):
    engine = Engine(TinyModel(SPEC), served, num_pages=16, chunk=4, max_batch=4)
    tokens.append(engine.generate(prompts(3), max_new_tokens=3))
assert tokens[0] == tokens[1] and len(tokens[0][0]) == 3
assert all(target.startswith("cpu-") for target in default_targets())

tuned = tune(SPEC, "cpu-portable", ops=["copy"])
assert [found.op for found in tuned.ops] == ["copy"]

for target in ("sm_90", "gfx942", "interpret"):
    assert "tl." in kvgen.builder.assemble(SPEC, target, tune="off").source("decode")  # needs no compiler
    try:
        print(kvgen.build(SPEC, target, tune="off"))
    except ToolchainError as error:
        print(error)
assert "triton" not in sys.modules
