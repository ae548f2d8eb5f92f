"""bench of a model: what a report holds; nothing here judges a speed."""

from __future__ import annotations

import pytest
import torch

from kvgen.errors import ArgumentError
from kvgen.models.bench import bench_model, other_attention, same_fraction
from kvgen.models.checkpoint import load_model
from kvgen.models.extras import installed
from kvgen.models.pages import specs_for
from kvgen.models.session import Loaded

pytestmark = pytest.mark.skipif(not installed("transformers"), reason="needs the extra 'models'")

PROMPTS = [[1, 2, 3], [4, 5, 6]]


@pytest.fixture(scope="module")
def loaded(checkpoint) -> Loaded:
    # Token 1 would end a text: no contender may stop there.
    return Loaded("tiny", load_model(checkpoint("gqa-tied")), None, tuple(range(97)))


def test_a_report_is_consistent(loaded: Loaded) -> None:
    specs = [specs_for(loaded.model.shape, pages) for pages in ("f32", "int8")]
    told: list[tuple[int, int]] = []
    report = bench_model(
        loaded,
        specs,
        PROMPTS,
        new_tokens=6,
        threads=1,
        rounds=3,
        advance=lambda done, total: told.append((done, total)),
    )
    rows = {row.contender: row for row in report.rows}
    assert list(rows) == ["kvgen f32", "kvgen int8", "transformers eager", "transformers SDPA"]
    ours, eager = rows["kvgen f32"], rows["transformers eager"]
    assert ours.ratio == ours.prefill_ratio == 1
    assert eager.ratio == pytest.approx(eager.step_ms / ours.step_ms)
    assert all(row.tokens_per_s == pytest.approx(2e3 / row.step_ms) for row in report.rows)
    assert ours.same_tokens == eager.same_tokens == rows["transformers SDPA"].same_tokens == 1
    assert (report.batch, report.prompt, report.new_tokens, report.threads) == (2, 3, 6, 1)
    assert told == [(0, 3), (1, 3), (2, 3)]
    assert report.to_json()["rows"][0]["contender"] == "kvgen f32"


def test_what_follows_a_difference_does_not_count() -> None:
    assert same_fraction([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 9, 3, 4], [5, 6, 7, 8]]) == 5 / 8


@pytest.mark.parametrize(
    ("prompts", "new", "match"), [([[1], [2, 3]], 4, "several lengths"), (PROMPTS, 1, "at least 2")]
)
def test_what_cannot_be_compared(loaded: Loaded, prompts: list[list[int]], new: int, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        bench_model(loaded, [], prompts, new_tokens=new)


def test_the_module_is_as_before(loaded: Loaded) -> None:
    module = loaded.model.module
    settings = module.generation_config
    with other_attention(module, "sdpa") as other:
        assert other.config._attn_implementation == "sdpa"
        assert torch.isfinite(other(torch.tensor([[1, 2]])).logits).all()
    assert module.config._attn_implementation == "kvgen"
    assert module.generation_config is settings
