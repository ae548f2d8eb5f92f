"""What an adversary gave the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvgen import paths
from kvgen.resolve import backend_for, resolve_target
from kvgen.tune import store
from kvgen.tune.key import key_of
from kvgen.tune.space import load_space, spec_facts
from tests.support.specs import make_spec


def test_cache_folder_of_a_user_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGEN_CACHE_DIR", "~no_such_user_here/kvgen")
    assert paths.configured_root() == Path("~no_such_user_here/kvgen").absolute()


@pytest.mark.parametrize("text", ["9" * 5000, "[" * 100_000], ids=["endless number", "endless nesting"])
def test_tuning_record_that_json_itself_gives_up_on(text: str, tmp_path: Path) -> None:
    spec = make_spec("f32", "f32", page_size=4, kv_heads=2, group=2, head_dim=16)
    target = resolve_target("cpu")
    space = load_space(backend_for(target).space("decode"))
    key = key_of("decode", spec, target, {}, space)
    path = tmp_path / key.file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.warns(paths.CacheWarning, match="is no tuning record"):
        assert store.read(path, key, space, spec_facts(spec, target)) is None
