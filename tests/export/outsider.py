"""Runs in a process of its own where neither kvgen nor its compiler can be imported: all ops of an export.

Arguments: folder of the package, its name, file with inputs, file for outputs, ``compile`` or ``plain``.
"""

import importlib
import sys
from typing import Any


class Absent:
    """An import hook for which kvgen and the compiler's packages do not exist."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


folder, package, inputs, outputs, mode = sys.argv[1:]
# torch.compile itself needs sympy and jinja2.
sys.meta_path.insert(0, Absent({"kvgen"} | ({"jinja2", "sympy", "triton"} if mode == "plain" else set())))
sys.path[:] = [folder, *(entry for entry in sys.path if entry != folder)]

import torch  # noqa: E402

kernels = importlib.import_module(package)
given = torch.load(inputs)
cache = kernels.new_cache(num_pages=8)


def step() -> tuple[Any, ...]:
    kernels.append(cache, given["k"], given["v"], **given["where"])
    kernels.copy(cache, given["src"], given["dst"])
    out, lse = kernels.decode(given["q"], cache, given["table"], given["lens"])
    more, lse_more = kernels.prefill(given["q"], cache, given["table"], given["lens"], given["starts"])
    merged = kernels.merge(torch.stack([out, more]), torch.stack([lse, lse_more]))
    return out, lse, more, lse_more, *merged


if mode == "compile":
    found = torch.compile(step, fullgraph=True, backend="aot_eager")()
    assert hasattr(torch.ops, package)
else:
    found = step()
    assert not {"kvgen", "sympy", "jinja2"} & set(sys.modules)
# A notebook imports again: the newcomer's ops get a namespace of their own.
again = importlib.reload(kernels)
del sys.modules[package]
third = importlib.import_module(package)
for newer in (again, third):
    newer.copy(newer.new_cache(num_pages=8), given["src"], given["dst"])
torch.save([*found, *kernels.gather(cache, given["table"], given["lens"])], outputs)
