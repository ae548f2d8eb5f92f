"""Loading: checks before dlopen, one handle a file, arguments that arrive, errors that name the field."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from kvgen.backends.cpu import compiler, isa, loader, toolchain
from kvgen.backends.cpu.loader import ArgStruct
from kvgen.errors import ArgumentError, ToolchainError, UnsupportedError

FIELDS = [("out", "ptr"), ("count", "i64"), ("scale", "f64")]
BODY = """
#include <cstdint>
%s
extern "C" int fill(const void* raw) {
  const Args& a = *static_cast<const Args*>(raw);
  if (a.count < 0) return 4;
  for (int64_t i = 0; i < a.count; ++i) static_cast<double*>(a.out)[i] = a.scale * static_cast<double>(i);
  return 0;
}
"""
SOURCE = BODY % ArgStruct(FIELDS).c_declaration()


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return toolchain.compile_shared(SOURCE, cache_dir=tmp_path)


def test_arguments_arrive_and_errors_return(library: Path) -> None:
    fill = loader.load(library).function("fill", FIELDS, {4: "negative count"})
    out = np.full(6, -1.0)
    fill(out.ctypes.data, 5, 2.5)
    assert out.tolist() == [0.0, 2.5, 5.0, 7.5, 10.0, -1.0]
    with pytest.raises(ToolchainError, match=r"fill returned 4 \(negative count\)"):
        fill(out.ctypes.data, -1, 1.0)
    assert fill.raw(fill.fields.pack(out.ctypes.data, -1, 1.0)) == 4
    with pytest.raises(ArgumentError, match="8 bytes, and fill takes 24"):
        fill.raw(bytes(8))


def test_concurrent_calls_do_not_share_arguments(library: Path) -> None:
    fill = loader.load(library).function("fill", FIELDS)
    wrong: list[float] = []

    def work(scale: float) -> None:
        out = np.zeros(2)
        for _ in range(3000):
            fill(out.ctypes.data, 2, scale)
            if out[1] != scale:
                wrong.append(out[1])

    threads = [threading.Thread(target=work, args=(float(n),)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_struct_is_packed_as_c_has_it() -> None:
    layout = ArgStruct(FIELDS)
    packed = layout.pack(2**64 - 1, -(2**63), 1.5)
    assert layout.nbytes == len(packed) == 24
    assert np.frombuffer(packed, np.uint64)[0] == 2**64 - 1
    assert np.frombuffer(packed, np.int64)[1] == -(2**63)
    assert np.frombuffer(packed, np.float64)[2] == 1.5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((1, 2), "2 arguments for 3 fields: out, count, scale"),
        ((1, 2.5, 1.0), "count = 2.5: not a valid i64"),
        ((-1, 2, 1.0), "out = -1: not a valid ptr"),
        ((1, 2**63, 1.0), "count = 9223372036854775808"),
        ((1, 2, "x"), "scale = 'x': not a valid f64"),
        ((None, 2, 1.0), "out = None"),
    ],
)
def test_arguments_that_do_not_fit_name_their_field(values: tuple[object, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ArgStruct(FIELDS).pack(*values)  # type: ignore[arg-type]


def test_fields_are_checked() -> None:
    with pytest.raises(ArgumentError, match="kinds are i64, ptr, f64"):
        ArgStruct([("x", "f32")])
    with pytest.raises(ArgumentError, match="twice"):
        ArgStruct([("x", "i64"), ("x", "ptr")])


def test_a_file_is_opened_once(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = loader.load(library)
    (tmp_path / "link").symlink_to(library.parent)

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("opened again")

    monkeypatch.setattr(loader.ctypes, "CDLL", forbidden)
    assert loader.load(str(library)) is first
    assert loader.load(tmp_path / "link" / library.name) is first


def test_a_function_keeps_its_library(library: Path) -> None:
    function = loader.load(library).function("fill", FIELDS)
    assert function.library is loader.load(library)


def test_a_missing_symbol_says_where_to_look(library: Path) -> None:
    with pytest.raises(ToolchainError, match=r"no symbol 'decode'; is it extern .*kernel\.cpp"):
        loader.load(library).function("decode", [])


def test_a_truncated_library_is_refused_and_would_have_killed_us(library: Path) -> None:
    whole = library.read_bytes()
    library.write_bytes(whole[:5000])
    with pytest.raises(ToolchainError, match=f"5000 bytes instead of {len(whole)}, as its sidecar says"):
        loader.load(library)
    # Why the check comes first: what dlopen itself makes of such a file is an error at best, SIGBUS at worst.
    code = f"import ctypes\ntry: ctypes.CDLL({str(library)!r})\nexcept OSError: raise SystemExit(3)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=30)
    assert done.returncode != 0


def test_a_foreign_file_is_refused(library: Path, tmp_path: Path) -> None:
    stranger = tmp_path / "libm.so"
    stranger.write_bytes(library.read_bytes())
    with pytest.raises(ToolchainError, match=r"no readable sidecar libm.json"):
        loader.load(stranger)


def test_code_for_another_cpu_is_refused_before_it_is_opened(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isa.machine() != "x86_64":
        pytest.skip("x86-64 rows")
    path = toolchain.compile_shared(SOURCE, flags=isa.flags_for("avx512", ("vnni",)), cache_dir=tmp_path)
    monkeypatch.setattr(isa, "cpu_features", lambda: frozenset(isa.ROWS["avx2"].required))
    with pytest.raises(UnsupportedError, match=r"needs avx512f, .*vnni, which this CPU lacks"):
        loader.load(path)
    monkeypatch.setattr(isa, "machine", lambda: "aarch64")
    with pytest.raises(UnsupportedError, match="built for x86_64"):
        loader.load(library)


def test_a_sanitised_library_is_refused_without_its_runtime(tmp_path: Path) -> None:
    """Opening it would print a line and end the process."""
    try:
        compiler.sanitizer_libraries(compiler.find_compiler())
    except ToolchainError as error:
        pytest.skip(str(error))
    path = toolchain.compile_shared(SOURCE, sanitize=True, cache_dir=tmp_path)
    with pytest.raises(ToolchainError, match="a sanitised build"):
        loader.load(path)


def test_what_the_linker_refuses_is_a_toolchain_error(tmp_path: Path) -> None:
    path = toolchain.compile_shared(
        'int absent(); extern "C" int f(const void*) { return absent(); }', cache_dir=tmp_path
    )
    with pytest.raises(ToolchainError, match=r"the dynamic linker refused it: .*absent"):
        loader.load(path)


def test_the_address_is_the_functions(library: Path) -> None:
    address = loader.load(library).address("fill")
    out = np.zeros(3)
    args = ArgStruct(FIELDS).pack(out.ctypes.data, 3, 1.0)
    assert ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)(address)(args) == 0
    assert out.tolist() == [0.0, 1.0, 2.0]
