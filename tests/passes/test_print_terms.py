"""Printed C++ and Triton texts compute what the expression means, negative positions included."""

from __future__ import annotations

import itertools
import math
import random
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvgen.ir.expression import Load, Name, Node
from kvgen.passes.print_terms import HELPERS, helpers, print_c, print_triton
from kvgen.passes.simplify import base2, simplify
from tests.support.expressions import NAMES, evaluate, random_int, random_predicate, read

EXACT = [
    "q_pos // 3 + q_pos % 3 * kv_pos",
    "kv_pos // CHUNK == q_pos // CHUNK",
    "q_pos // lead[batch] - q_pos % lead[batch]",
    "kv_pos * (q_pos // 4) - (kv_pos - (q_pos - 3))",
    "-q_pos - -3 - (-kv_pos)",
    "1 << kv_pos & 12345678 | kv_pos ^ 3",
    "tree[q_row] >> q_pos",
    "tree[q_row] >> 2 & 1 == 1",
    "1 << q_pos + 40",
    "not kv_pos < 3 and (q_pos > 2 or kv_pos == q_pos)",
    "(kv_pos < 3) == (q_pos > 2)",
    "((kv_pos < 3) == (q_pos > 2)) != shown[q_row, kv_pos]",
    "where(kv_pos < q_pos, kv_pos, where(shown[q_row, kv_pos], 7, q_pos))",
    "min(kv_pos, q_pos, 4) + max(abs(q_pos), 3)",
    "int(score) + int(kv_pos < 3)",
    "kv_pos < kv_len - q_len or (tree[q_row] >> max(kv_pos - (kv_len - q_len), 0)) & 1 == 1",
    "True or False and kv_pos < 3",
    "score * 2 < q_pos",
    "(kv_pos + 2) // 3 + kv_pos % 5",
]
CLOSE = [
    "score - slope[head] * abs(q_pos - kv_pos)",
    "50 * tanh(score / 50)",
    "sigmoid(score) * tanh(score) + exp(-abs(score)) - exp2(score / 3)",
    "log(1 + score * score) + log2(2 + kv_pos) + sqrt(kv_pos)",
    "q_pos / (kv_pos + 1) + kv_pos / 7",
    "score - (slope[head] - (score - 1)) * (2 - score)",
    "score / (slope[head] / 3 / (kv_pos + 1.5))",
    "where(kv_pos <= q_pos, score, -1)",
    "min(score, 1) + max(slope[head], q_pos, 0.5)",
    "float(q_pos) * 2 - int(score) / 3 + float(kv_pos < 3)",
    "-score - -2.5",
    "exp(q_pos / 8)",
]


def nodes() -> list[Node]:
    """The texts, as written and simplified, their scores in base 2, and random trees, simplified."""
    found = [read(text) for text in EXACT + CLOSE]
    found += [simplify(node) for node in found] + [base2(read(text)) for text in CLOSE]
    rng = random.Random(5)
    found += [simplify(random_int(rng.choice, 3)) for _ in range(40)]
    found += [simplify(random_predicate(rng.choice, 3)) for _ in range(40)]
    return found


NODES = nodes()
SAME = {"q_row": 1, "head": 2, "batch": 0, "kv_len": 9, "q_len": 4, "WINDOW": 3, "CHUNK": 4}
POINTS: list[dict[str, Any]] = [
    {
        "q_pos": q,
        "kv_pos": kv,
        "score": score,
        "lead": lead,
        "slope": 0.25 * lead + 0.125,
        "tree": -6 if kv % 2 else 11,
        "shown": (kv + q) % 3 == 0,
    }
    | SAME
    for q, kv, (score, lead) in itertools.product(
        (-70, -9, -4, -1, 0, 1, 3, 8), (0, 2, 3, 5, 24), ((-2.5, -3), (0.75, 0), (3.25, 2))
    )
]
INPUTS = {name: type(value) for name, value in POINTS[0].items()}
CPP = {int: "int64_t", float: "float", bool: "bool"}


def by_param(load: Load) -> str:
    return load.param


def wanted(node: Node, point: dict[str, Any]) -> float:
    return float(evaluate(node, point))


def compare(node: Node, got: list[float]) -> None:
    for point, value in zip(POINTS, got, strict=True):
        right = wanted(node, point)
        if node.type == "float":
            assert math.isclose(value, right, rel_tol=2e-5, abs_tol=2e-5), (node, point)
        else:
            assert value == right, (node, point)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_cpp(tmp_path: Path) -> None:
    """One program prints every expression at every point."""
    names = {name: name for name in NAMES}
    used = sorted({name for node in NODES for name in helpers(node)})
    assert used == sorted(HELPERS), "every helper is tried"
    arguments = ", ".join(f"{CPP[kind]} {name}" for name, kind in INPUTS.items())
    lines = [
        "#include <algorithm>",
        "#include <cmath>",
        "#include <cstdint>",
        "#include <cstdio>",
        "#include <cstdlib>",
    ]
    lines += [HELPERS[name].cpp for name in used]
    lines += [f"struct Point {{ {'; '.join(f'{CPP[kind]} {name}' for name, kind in INPUTS.items())}; }};"]
    rows = ("{" + ", ".join(str(v).lower() for v in point.values()) + "}" for point in POINTS)
    lines += [f"static const Point POINTS[] = {{{', '.join(rows)}}};"]
    for place, node in enumerate(NODES):
        kind = {"bool": "bool", "int": "int64_t", "float": "float"}[node.type]
        lines += [f"static {kind} f{place}({arguments}) {{ return {print_c(node, names, by_param)}; }}"]
    given = ", ".join(f"p.{name}" for name in INPUTS)
    calls = " ".join(f'std::printf("%.17g\\n", double(f{place}({given})));' for place in range(len(NODES)))
    lines += [f"int main() {{ for (const Point& p : POINTS) {{ {calls} }} }}"]
    (tmp_path / "all.cpp").write_text("\n".join(lines))
    flags = ["-O0", "-std=c++20", "-Wall", "-Werror", "-Wno-tautological-compare"]
    command = ["g++", *flags, "all.cpp", "-o", "all"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]
    text = subprocess.run([tmp_path / "all"], capture_output=True, text=True, check=True).stdout
    values = np.array([float(line) for line in text.split()]).reshape(len(POINTS), len(NODES))
    for place, node in enumerate(NODES):
        compare(node, values[:, place].tolist())


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_smallest_integer_divides_without_a_trap(tmp_path: Path) -> None:
    lines = ["#include <cstdint>", "#include <cstdlib>", HELPERS["any_div"].cpp, HELPERS["any_mod"].cpp]
    lines += ["int main(int argc, char**) {", "  const int64_t a = INT64_MIN, b = -argc;"]
    lines += ["  return !(any_div(a, b) == INT64_MIN && any_mod(a, b) == 0 && any_div(7, b) == -7);", "}"]
    (tmp_path / "min.cpp").write_text("\n".join(lines))
    subprocess.run(["g++", "-O1", "min.cpp", "-o", "min"], cwd=tmp_path, check=True)
    assert subprocess.run([tmp_path / "min"], check=False).returncode == 0


class Tensor(np.ndarray):  # type: ignore[type-arg]
    """Integers that divide as a GPU's do: towards zero."""

    def __floordiv__(self, other: Any) -> Any:
        a, b = np.asarray(self), np.asarray(other)
        quotient = np.abs(a) // np.abs(b)
        return np.where((a < 0) != (b < 0), -quotient, quotient).view(Tensor)

    def __mod__(self, other: Any) -> Any:
        return self - self // other * other

    def to(self, dtype: Any) -> Any:
        return self.astype(dtype)


TL = SimpleNamespace(
    int32=np.int64,  # no test point needs to overflow 32 bits to be told apart
    int64=np.int64,
    float32=np.float64,
    cast=lambda x, dtype: np.asarray(x).astype(dtype).view(Tensor),
    where=lambda c, a, b: np.where(c, a, b).view(Tensor),
    minimum=lambda a, b: np.minimum(a, b).view(Tensor),
    maximum=lambda a, b: np.maximum(a, b).view(Tensor),
    abs=np.abs,
    exp=np.exp,
    exp2=np.exp2,
    log=np.log,
    log2=np.log2,
    sqrt=np.sqrt,
)


def test_triton() -> None:
    """The texts as Python, over arrays that divide as Triton's tensors do."""
    scope: dict[str, Any] = {"tl": TL, "triton": SimpleNamespace(jit=lambda function: function)}
    for name in HELPERS:
        exec(HELPERS[name].triton, scope)  # noqa: S102 - texts of this project
    names = {name: f"{name}_T" for name in NAMES} | {"q_pos": "q_pos_T + 0", "kv_pos": "kv_pos_T[:]"}
    arrays = {f"{name}_T": np.array([p[name] for p in POINTS]).view(Tensor) for name in INPUTS}
    for node in NODES:
        text = print_triton(node, names, lambda load: f"{load.param}_T")
        result = np.broadcast_to(np.asarray(eval(text, scope | arrays)), len(POINTS))  # noqa: S307
        compare(node, result.astype(float).tolist())


@pytest.mark.parametrize(
    ("text", "cpp", "triton"),
    [
        ("score - abs(q_pos - kv_pos)", "score - float(std::abs(q - kv))", "score - tl.abs(q - kv)"),
        ("kv_pos <= q_pos or kv_pos < 4", "kv <= q || kv < 4", "(kv <= q) | (kv < 4)"),
        ("not kv_pos < 4 and q_pos < 3", "!(kv < 4) && q < 3", "~(kv < 4) & (q < 3)"),
        ("kv_pos < 4 and q_pos < 3 or True", "(kv < 4 && q < 3) || true", "((kv < 4) & (q < 3)) | True"),
        ("kv_pos // 4 == q_pos // 4", "kv / 4 == floor_div(q, 4)", "kv // 4 == floor_div(q, 4)"),
        ("min(score, 2)", "std::min<float>(score, 2.0f)", "tl.minimum(score, 2.0)"),
        ("max(kv_pos, 2)", "std::max<int64_t>(kv, 2)", "tl.maximum(kv, 2)"),
        ("tree[q_row] >> 3 & 1 == 1", "((tree >> 3) & 1) == 1", "((tree >> 3) & 1) == 1"),
        ("where(kv_pos < 3, score, 1)", "(kv < 3 ? score : 1.0f)", "tl.where(kv < 3, score, 1.0)"),
        ("tanh(score)", "tanh_(score)", "tanh_(score)"),
        ("(kv_pos + 1) * 2 - (q_pos - 1)", "(kv + 1) * 2 - (q - 1)", "(kv + 1) * 2 - (q - 1)"),
    ],
)  # fmt: skip
def test_texts(text: str, cpp: str, triton: str) -> None:
    names = {name: name.removesuffix("_pos") for name in NAMES}
    assert print_c(read(text), names, by_param) == cpp
    assert print_triton(read(text), names, by_param) == triton


def test_names_with_operators_get_parentheses() -> None:
    names = {"q_pos": "first + row", "kv_pos": "key_T[None, :]"}
    assert print_c(read("q_pos * 2"), names, by_param) == "(first + row) * 2"
    assert print_triton(read("kv_pos * 2"), names, by_param) == "key_T[None, :] * 2"


def test_only_helpers_in_use_are_named() -> None:
    assert helpers(read("kv_pos // 4 + kv_pos % 4 < q_pos")) == ()
    assert helpers(read("tanh(score) + q_pos // 4")) == ("tanh_", "floor_div")
    assert helpers(Name("score")) == ()


def test_tanh_is_as_good_as_it_says() -> None:
    """In 32 bits, everywhere: no overflow, and never further off than 2e-7."""
    x = np.concatenate([np.linspace(-12, 12, 20001), [-1e30, 1e30, -np.inf, np.inf]]).astype(np.float32)
    one, two = np.float32(1), np.float32(2)
    with np.errstate(over="ignore"):
        got = one - two / (one + np.exp2(np.float32(2.8853901) * x))
    assert np.abs(got - np.tanh(x.astype(np.float64))).max() < 2e-7
