"""Equal machine code is found to be equal, whatever its entry is called; other code or constants are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvgen.backends.cpu.toolchain import compile_shared
from kvgen.tune.binary import digest

SOURCE = """
#include <cmath>
extern "C" int NAME(const void* args) {
  const double* x = *(const double* const*)args;
  static const double table[4] = {1.5, 2.5, 3.5, 4.5};
  double* y = *((double* const*)args + 1);
  for (int i = 0; i < 4; ++i) y[i] = std::sin(x[i]) * table[i];
  return 0;
}
"""


def built(name: str = "a", **changes: str) -> Path:
    text = SOURCE.replace("NAME", name)
    for old, new in changes.values():
        assert old in text
        text = text.replace(old, new)
    return compile_shared(text, opt="-O2", name="twin")


def test_the_name_of_the_entry_does_not_matter() -> None:
    first, second = built("decode__tile_16"), built("decode_with_quite_another_name__tile_32_heads_8" * 3)
    assert first.read_bytes() != second.read_bytes()
    assert digest(first) == digest(second)


@pytest.mark.parametrize(
    ("old", "new"),
    [("i < 4", "i < 3"), ("3.5", "3.25"), ("std::sin", "std::cos")],
    ids=["code", "constant", "call"],
)
def test_what_runs_does(old: str, new: str) -> None:
    assert digest(built()) != digest(built(change=(old, new)))


def test_other_files_are_like_no_other(tmp_path: Path) -> None:
    whole = built().read_bytes()
    found = set()
    for number, data in enumerate([b"", b"\x7fELF", whole[:200], whole[: len(whole) // 2], b"MZ" + whole]):
        path = tmp_path / str(number)
        path.write_bytes(data)
        found.add(digest(path))
    assert len(found | {digest(built())}) == 6
