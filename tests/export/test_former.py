"""An export that kvgen wrote at 45e598f, before arguments lost their suffixes, loads and runs.

``recorded/`` holds three of its kernels as sources, and its manifest with the other kernels taken out; the
binaries are compiled here, since they are a machine's own.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from kvgen.backends.cpu import toolchain
from kvgen.runtime import load
from kvgen.runtime.manifest import File, sealed

RECORDED = Path(__file__).with_name("recorded")


@pytest.fixture
def former(tmp_path: Path) -> Path:
    folder = tmp_path / "old"
    shutil.copytree(RECORDED, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest == sealed(manifest)
    for kernel in manifest["targets"]["cpu-portable"]:
        source = folder / kernel["source"]["path"]
        built = toolchain.compile_shared(source.read_text(), opt="-O1", name=source.stem)
        data = built.read_bytes()
        (binary,) = kernel["binaries"]
        (folder / binary["path"]).write_bytes(data)
        binary |= vars(File.of(binary["path"], data))
        kernel["facts"] = json.loads(built.with_suffix(".json").read_text())
    (folder / "manifest.json").write_text(json.dumps(sealed(manifest)))
    return folder


def test_it_runs_by_both_names(former: Path) -> None:
    lib = load(former)
    cache, noise = lib.new_cache(4), torch.Generator().manual_seed(5)
    k, v = torch.randn(2, 6, 2, 16, generator=noise)
    q = torch.randn(1, 4, 16, generator=noise)
    pages, lens = torch.tensor([[3, 1]], dtype=torch.int32), torch.tensor([6], dtype=torch.int32)
    lib.append(cache, k=k, v=v, slots=torch.tensor([12, 13, 14, 15, 4, 5]))
    out, lse = lib.decode(q=q, cache=cache, page_table=pages, kv_lens=lens)
    with pytest.deprecated_call():
        again, _ = lib.decode(q_BHD=q, cache=cache, page_table_BP=pages, kv_lens_B=lens)
    assert torch.equal(out, again)
    stored_k, stored_v = (t.double().numpy() for t in lib.gather(cache, page_table=pages, kv_lens=lens))
    assert np.abs(stored_k - k.numpy()).max() < 0.02  # half a step of amax / 127
    score = np.einsum("hd,thd->ht", q[0].double().numpy() / 4.0, stored_k.repeat(2, axis=1)) / np.log(2.0)
    weight = np.exp2(score)
    expected = np.einsum("ht,thd->hd", weight / weight.sum(1, keepdims=True), stored_v.repeat(2, axis=1))
    np.testing.assert_allclose(out[0].numpy(), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(lse[0].numpy(), np.log2(weight.sum(1)), rtol=1e-5, atol=1e-5)
