"""The launcher over the driver API, against a stand-in that writes down every call."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from kvgen.backends.triton.backend import TritonBackend
from kvgen.backends.triton.cubin import CubinKernel, Part
from kvgen.backends.triton.driver import Driver
from kvgen.builder import assemble
from kvgen.capture import Capture
from kvgen.errors import ArgumentError, ToolchainError
from tests.support.specs import make_spec
from tests.support.standin import StandIn

SPEC = make_spec("bf16", "bf16", page_size=16, kv_heads=2, group=4, head_dim=64, q_dtype="bf16")


@pytest.fixture
def standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn(tmp_path / "calls", monkeypatch)


def parts_of(kernel: Any) -> list[Part]:
    return [
        Part(
            compiled.metadata.name,
            compiled.signature,
            compiled.metadata.num_warps,
            compiled.metadata.shared,
            compiled.metadata.global_scratch_size,
            compiled.binary,
        )
        for compiled in kernel.compiled
    ]


@pytest.fixture(scope="module")
def decode() -> tuple[Any, list[Part], Any]:
    """The plan and parts of decode for sm_90, and values of a call: CPU tensors stand for device memory."""
    library = assemble(SPEC, "sm_90")
    (kernel,) = TritonBackend().compile([library._plan("decode", "single")])
    seen = Capture(SPEC, library.record)
    cache = seen.new_cache(5)
    table = torch.tensor([[0, 1, 2], [3, 4, 0]], dtype=torch.int32)
    lens = torch.tensor([33, 20], dtype=torch.int32)
    seen.decode(torch.zeros(2, 8, 64, dtype=torch.bfloat16), cache, table, lens, scale=0.5)
    seen.values["workspace"] = torch.empty(1 << 20, dtype=torch.uint8)
    return kernel.plan, parts_of(kernel), (seen.values, cache)


def unpacked(part: Part, call: dict[str, Any]) -> dict[str, Any]:
    """Parameter bytes as numbers, by name; the hidden ones under ``hidden``."""
    fields = [bytes.fromhex(text) for text in call["parameters"].split()]
    codes = {"i32": "i", "i64": "q", "fp32": "f"}
    found: dict[str, Any] = {}
    for (name, kind), data in zip(part.signature, fields, strict=False):
        found[name] = struct.unpack("Q" if kind.startswith("*") else codes[kind], data)[0]
    found["hidden"] = [struct.unpack("Q", data)[0] for data in fields[len(part.signature) :]]
    return found


def test_a_decode_is_launched_with_the_right_bytes(
    standin: StandIn, decode: tuple[Any, list[Part], Any]
) -> None:
    plan, parts, (values, _) = decode
    kernel = CubinKernel(plan, parts, Driver(standin.library))
    assert kernel.workspace(values) > 0
    kernel.launch(values)
    kernel.launch(values)
    launched = standin.calls("cuLaunchKernel")
    assert [call["name"] for call in launched] == [part.name for part in parts] * 2
    split, merge = launched[:2]
    assert split["block"] == [32 * parts[0].num_warps, 1, 1] and split["shared"] == parts[0].shared
    assert split["stream"] == 0 and split["grid"][0] == 2 and merge["grid"][0] == 2
    found = unpacked(parts[0], split)
    for name in ("q", "k", "v", "page_table", "kv_lens", "workspace"):
        assert found[f"{name}_ptr"] == values[name].data_ptr(), name
    assert found["q_stride_tok"] == 8 * 64 and found["table_stride"] == 3
    assert found["score_scale"] == pytest.approx(0.5 * 1.4426950408889634)
    assert found["hidden"] == [0, 0]
    last = unpacked(parts[1], merge)
    assert last["out_ptr"] == values["out"].data_ptr() and last["hidden"] == [0, 0]


def test_shared_memory_beyond_48_kb_is_asked_for(
    standin: StandIn, decode: tuple[Any, list[Part], Any]
) -> None:
    _, parts, _ = decode
    driver = Driver(standin.library)
    driver.load(parts[0].cubin, parts[0].name, 48 * 1024)
    assert not standin.calls("cuFuncSetAttribute")
    large = driver.load(parts[0].cubin, parts[0].name, 100 * 1024)
    (asked,) = standin.calls("cuFuncSetAttribute")
    assert (asked["attribute"], asked["value"]) == (8, 100 * 1024)
    assert large.shared == 100 * 1024


def test_the_order_of_the_first_calls(standin: StandIn, decode: tuple[Any, list[Part], Any]) -> None:
    driver = Driver(standin.library)
    driver.load(decode[1][0].cubin, decode[1][0].name, 0)
    names = [call["call"] for call in standin.calls()]
    assert names == [
        "cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuModuleLoadData", "cuModuleGetFunction",
    ]  # fmt: skip


def test_what_the_device_is(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Driver(standin.library).device()
    assert (found.name, found.target, found.sms, found.driver) == ("Stand-in GPU", "sm_90", 132, "13.0")
    monkeypatch.setenv("KVGEN_STANDIN_CC", "100")
    assert Driver(standin.library).device().target == "sm_100"


def test_times_are_read_between_marks(standin: StandIn, decode: tuple[Any, list[Part], Any]) -> None:
    plan, parts, (values, _) = decode
    driver = Driver(standin.library)
    bound = CubinKernel(plan, parts, driver).bound(values)
    start, end = driver.event(), driver.event()
    start.record()
    for launch in bound * 3:
        launch.run()
    end.record()
    end.wait()
    assert end.seconds_since(start) == pytest.approx(6.1e-5)
    start.close()
    end.close()
    assert len(standin.calls("cuEventDestroy")) == 2


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        ("cuModuleLoadData", 209, r"cuModuleLoadData: CUDA_ERROR_NO_BINARY_FOR_GPU \(no kernel image"),
        ("cuLaunchKernel", 701, "cuLaunchKernel: error 701"),
        ("cuCtxSynchronize", 700, "cuCtxSynchronize: error 700"),
        ("cuInit", 3, r"cuInit: CUDA_ERROR_NOT_INITIALIZED \(initialization error\)"),
    ],
)
def test_errors_carry_the_drivers_words(
    standin: StandIn, decode: tuple[Any, list[Part], Any], function: str, error: int, words: str
) -> None:
    plan, parts, (values, _) = decode
    standin.fail(function, error)

    def start_to_end() -> None:
        driver = Driver(standin.library)
        CubinKernel(plan, parts, driver).launch(values)
        driver.synchronize()

    with pytest.raises(ToolchainError, match=words):
        start_to_end()


def test_what_is_refused_before_the_driver_sees_it(
    standin: StandIn, decode: tuple[Any, list[Part], Any], tmp_path: Path
) -> None:
    plan, parts, _ = decode
    driver = Driver(standin.library)
    with pytest.raises(ToolchainError, match="global scratch"):
        CubinKernel(plan, [dataclasses.replace(parts[0], scratch=128), parts[1]], driver)
    fewer = dataclasses.replace(parts[0], signature=parts[0].signature[:-1])
    with pytest.raises(ToolchainError, match="the binary takes parameters of"):
        CubinKernel(plan, [fewer, parts[1]], driver)
    with pytest.raises(ArgumentError, match=r"grid = \(0, 1\)"):
        driver.launch(None, (0, 1), 128, 0, 0, None)
    with pytest.raises(ToolchainError, match="named symbol not found"):
        driver.load(parts[0].cubin, "no_such_kernel", 0)
    with pytest.raises(ToolchainError, match="no driver of NVIDIA's here"):
        Driver(tmp_path / "libcuda.so.1")
    assert not standin.calls("cuLaunchKernel")
