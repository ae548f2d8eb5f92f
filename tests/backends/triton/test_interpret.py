"""Launches through the interpreter: aliasing, types, errors, and workers that die."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvgen.backends.triton.interpret import InterpreterClient
from kvgen.backends.triton.memory import Region, merged
from kvgen.backends.triton.source import TritonSource
from kvgen.errors import ArgumentError, ToolchainError, UnsupportedError

torch = pytest.importorskip("torch")

HEAD = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
COPY = HEAD + (
    "def copy(dst, src, n, SIZE: tl.constexpr):\n"
    "    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)\n"
    "    x = tl.load(src + i, mask=i < n)\n"
    "    tl.store(dst + i, x, mask=i < n)\n"
)


def attention(client: InterpreterClient, paged: TritonSource, slab: Any, kv_len: int) -> None:
    """Run ``paged`` on views of ``slab`` [page, kv, tok, d] and compare with torch."""
    dim = slab.shape[-1]
    q = torch.randn(16, dim).bfloat16()
    out = torch.full((16, dim), 7.0).bfloat16()
    table = torch.tensor([4, 1, 3], dtype=torch.int32)
    small = TritonSource(
        paged.text, paged.kernel, paged.signature,
        {"PAGE": 16, "D": dim, "ROWS": 16, "TILE": 16, "UPCAST": True}, paged.aligned,
    )  # fmt: skip
    arguments = {
        "out_ptr": out, "q_ptr": q, "k_ptr": slab[:, 0], "v_ptr": slab[:, 1], "table_ptr": table,
        "kv_len": kv_len, "page_stride": slab.stride(0), "scale": 0.3,
    }  # fmt: skip
    before = slab.clone()
    client.launch_source(small, (1,), arguments)
    k, v = (slab[table.long(), i].reshape(-1, dim)[:kv_len].float() for i in (0, 1))
    wanted = torch.softmax(q.float() @ k.T * 0.3 * math.log(2), -1) @ v
    torch.testing.assert_close(out.float(), wanted, atol=1e-2, rtol=1e-2)
    assert torch.equal(slab, before)


def test_paged_attention_in_bf16(interpreter: InterpreterClient, paged: TritonSource) -> None:
    torch.manual_seed(0)
    attention(interpreter, paged, torch.randn(6, 2, 16, 32).bfloat16(), 37)


ALIAS = HEAD + (
    "def kernel(k, v, n: tl.constexpr):\n"
    "    i = tl.arange(0, n)\n"
    "    tl.store(k + i, i.to(tl.float32))\n"
    "    tl.store(v + i, tl.load(v + i - n) + 100.0)\n"  # v - n is k: only true of one slab
)


@pytest.mark.parametrize("v_is", ["torch", "numpy"])
def test_views_of_one_storage_alias(interpreter: InterpreterClient, v_is: str) -> None:
    slab = torch.full((4, 2, 8), -1.0)
    v = slab[2, 1] if v_is == "torch" else slab[2, 1].numpy()
    interpreter.launch(ALIAS, "kernel", (1,), {"k": slab[2, 0], "v": v}, {"n": 8})
    assert slab[2, 0].tolist() == list(range(8))
    assert slab[2, 1].tolist() == [100.0 + i for i in range(8)]
    slab[2] = -1
    assert (slab == -1).all()


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool"]
)
def test_every_element_type_travels(interpreter: InterpreterClient, dtype: str) -> None:
    source = torch.tensor([1, 0, 1, 1, 0]).to(getattr(torch, dtype))
    target = torch.zeros_like(source)
    interpreter.launch(COPY, "copy", (2,), {"dst": target, "src": source, "n": 5}, {"SIZE": 4})
    assert torch.equal(target, source)


def test_fp8_bits_travel(interpreter: InterpreterClient) -> None:
    source = torch.tensor([1.0, -448.0, 0.0156]).to(torch.float8_e4m3fn)
    target = torch.zeros(3)
    text = COPY.replace("x, mask", "x.to(tl.float32), mask")
    interpreter.launch(text, "copy", (1,), {"dst": target, "src": source, "n": 3}, {"SIZE": 4})
    assert torch.equal(target, source.float())


def test_empty_and_missing_tensors(interpreter: InterpreterClient) -> None:
    text = HEAD + (
        "def kernel(out, a, b):\n"
        "    if b is None:\n"
        "        tl.store(out, 3.0 + tl.load(a, mask=False, other=1.0))\n"
    )
    out = torch.zeros(1)
    for empty in (torch.empty(0), torch.zeros(4)[2:2], np.empty((0, 3), np.float32)):
        out.zero_()
        interpreter.launch(text, "kernel", (1,), {"out": out, "a": empty, "b": None}, {})
        assert out.item() == 4.0
    null = HEAD + "def kernel(out, a):\n    tl.store(out, tl.load(a, mask=False, other=5.0))\n"
    types = {"out": "*fp32", "a": "*fp32"}
    interpreter.launch(null, "kernel", (1,), {"out": out, "a": None}, {}, signature=types)
    assert out.item() == 5.0


def test_scalars_have_the_types_of_the_signature(interpreter: InterpreterClient) -> None:
    text = (
        HEAD
        + "def kernel(out, n, x):\n    tl.store(out, n * n)\n    tl.store(out + 1, (x * 4).to(tl.int64))\n"
    )
    out = torch.zeros(2, dtype=torch.int64)
    types = {"out": "*i64", "n": "i64", "x": "fp32"}
    interpreter.launch(text, "kernel", (1,), {"out": out, "n": 70000, "x": 1.75}, {}, signature=types)
    assert out.tolist() == [70000**2, 7]


def test_zero_blocks_launch_nothing(interpreter: InterpreterClient) -> None:
    interpreter.launch("not even Python", "kernel", (2, 0), {}, {})


def test_exception_in_the_kernel_keeps_its_traceback(interpreter: InterpreterClient) -> None:
    text = HEAD + "def kernel(out):\n    tl.store(out, 1.0)\n    assert False, 'on purpose'\n"
    out = torch.zeros(1)
    with pytest.raises(ToolchainError, match=r"(?s)in kernel\n.*assert False.*on purpose"):
        interpreter.launch(text, "kernel", (1,), {"out": out}, {})
    assert out.item() == 0  # a launch that fails changes nothing
    with pytest.raises(ToolchainError, match="SyntaxError"):
        interpreter.launch("def broken(:", "broken", (1,), {}, {})
    with pytest.raises(ToolchainError, match=r"no_such is not a @triton\.jit function"):
        interpreter.launch(text, "no_such", (1,), {}, {})


def test_what_the_interpreter_lacks_is_unsupported(interpreter: InterpreterClient) -> None:
    text = HEAD + (
        "def kernel(out):\n"
        "    x = tl.inline_asm_elementwise('mov.b32 $0, 1;', '=r', [], tl.int32, True, 1)\n"
        "    tl.store(out, x)\n"
    )
    with pytest.raises(UnsupportedError, match="NotImplementedError"):
        interpreter.launch(text, "kernel", (1,), {"out": torch.zeros(1, dtype=torch.int32)}, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dst": 3.5j}, "use a tensor"),
        ({"dst": torch.zeros(4, dtype=torch.complex64)}, "complex64"),
        ({"dst": torch.zeros(4, device="meta")}, "CPU tensors"),
        ({"extra": 1}, r"unknown \['extra'\]"),
    ],
    ids=["type", "dtype", "device", "unknown"],
)
def test_arguments_are_refused(interpreter: InterpreterClient, change: dict[str, Any], message: str) -> None:
    arguments = {"dst": torch.zeros(4), "src": torch.zeros(4), "n": 4, **change}
    with pytest.raises(ArgumentError, match=message):
        interpreter.launch(COPY, "copy", (1,), arguments, {"SIZE": 4})


def test_grid_is_refused_where_a_gpu_would(interpreter: InterpreterClient) -> None:
    with pytest.raises(ArgumentError, match=r"grid\[1\] = 65536"):
        interpreter.launch(COPY, "copy", (1, 65536), {}, {})
    with pytest.raises(ArgumentError, match="one to three"):
        interpreter.launch(COPY, "copy", (), {}, {})


def test_write_outside_the_tensors_is_found(interpreter: InterpreterClient) -> None:
    target = torch.zeros(5)
    with pytest.raises(ToolchainError, match="wrote 12 bytes outside its tensors, the first 0 bytes past"):
        interpreter.launch(COPY, "copy", (1,), {"dst": target, "src": torch.zeros(8), "n": 8}, {"SIZE": 8})
    assert (target == 0).all()
    # a read outside sees NaN
    interpreter.launch(
        COPY, "copy", (1,), {"dst": (out := torch.zeros(8)), "src": target, "n": 8}, {"SIZE": 8}
    )
    assert out.isnan().tolist() == [False] * 5 + [True] * 3


def test_read_only_array_is_not_written(interpreter: InterpreterClient) -> None:
    target = np.zeros(4, np.float32)
    target.flags.writeable = False
    with pytest.raises(ArgumentError, match="read-only"):
        interpreter.launch(COPY, "copy", (1,), {"dst": target, "src": torch.ones(4), "n": 4}, {"SIZE": 4})
    assert (target == 0).all()


def test_memory_may_grow(interpreter: InterpreterClient) -> None:
    for size in (4, 1 << 19, 8, 3 << 20):
        source = torch.arange(size, dtype=torch.int32)
        target = torch.zeros_like(source)
        interpreter.launch(COPY, "copy", (12,), {"dst": target, "src": source, "n": size}, {"SIZE": 1 << 18})
        assert torch.equal(target, source)


def wait_for_end(client: InterpreterClient) -> None:
    """Until the system has ended every thread of the worker: a kill returns before that."""
    while client.worker_pid is not None:
        time.sleep(0.01)


def test_worker_killed_between_launches_is_replaced(interpreter: InterpreterClient) -> None:
    source, target = torch.ones(4), torch.zeros(4)
    arguments = {"dst": target, "src": source, "n": 4}
    interpreter.launch(COPY, "copy", (1,), arguments, {"SIZE": 4})
    first = interpreter.worker_pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    wait_for_end(interpreter)
    target.zero_()
    interpreter.launch(COPY, "copy", (1,), arguments, {"SIZE": 4})
    assert interpreter.worker_pid not in (None, first)
    assert torch.equal(target, source)


def test_wild_address_kills_the_worker_and_names_the_line(interpreter: InterpreterClient) -> None:
    text = HEAD + "def kernel(out):\n    tl.store(out, tl.load(out + 1000000000000))\n"
    with pytest.raises(ToolchainError, match=r"(?s)died in kernel: killed by SIGSEGV.*line 7 in kernel"):
        interpreter.launch(text, "kernel", (1,), {"out": torch.zeros(1)}, {})
    test_zero_blocks_launch_nothing(interpreter)
    interpreter.launch(COPY, "copy", (1,), {"dst": torch.zeros(4), "src": torch.ones(4), "n": 4}, {"SIZE": 4})


def test_kernel_that_hangs_costs_its_time(interpreter: InterpreterClient) -> None:
    text = "import time\n" + HEAD + "def kernel(out):\n    while True:\n        tl.store(out, 1.0)\n"
    with pytest.raises(ToolchainError, match=r"kernel did not finish in 1\.5 s"):
        interpreter.launch(text, "kernel", (1,), {"out": torch.zeros(1)}, {}, timeout_s=1.5)
    assert interpreter.worker_pid is None


def test_closing_removes_process_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    client = InterpreterClient()
    client.launch(COPY, "copy", (1,), {"dst": torch.zeros(4), "src": torch.ones(4), "n": 4}, {"SIZE": 4})
    pid = client.worker_pid
    assert pid is not None
    assert list(tmp_path.iterdir())
    client.close()
    client.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(ToolchainError, match="closed"):
        client.launch(COPY, "copy", (1,), {}, {})


def test_triton_36_runs_loops_with_run_time_bounds(paged: TritonSource, triton36: str) -> None:
    torch.manual_seed(1)
    with InterpreterClient(python=triton36, timeout_s=120) as client:
        attention(client, paged, torch.randn(6, 2, 16, 32).bfloat16(), 37)


def test_merged_regions() -> None:
    constant = Region(30, 40, writable=False)
    regions = [Region(10, 20), Region(0, 5), Region(15, 30), Region(7, 7), constant]
    assert merged(regions) == [Region(0, 5), Region(10, 30), constant]
