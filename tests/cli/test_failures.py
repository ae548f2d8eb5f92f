"""What users see when something is wrong: readable text, exit codes, no traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from kvgen.commands.failures import INTERRUPTED, guarded

INT8 = "examples/llama3-8b-int8.toml"
WRONG = """
[attention]
q_heads = 30
kv_heads = 8
head_dim = 100
[cache]
page_size = 0
layout = "page kv head tok"
[cache.k]
formt = "int8"
[cache.v]
format = "int9"
"""


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    path = tmp_path / "wrong.toml"
    path.write_text(WRONG)
    return path


@pytest.mark.parametrize("command", ["show", "explain"])
def test_every_mistake_on_its_own_line(kvgen: Any, wrong: Path, command: str) -> None:
    result = kvgen(command, wrong)
    assert result.exit_code == 2 and result.stdout == ""
    lines = result.stderr.splitlines()
    for path in (
        "attention.q_heads",
        "attention.head_dim",
        "cache.page_size",
        "cache.k.formt",
        "cache.layout",
    ):
        assert len([line for line in lines if line.startswith(f"  {path} = ")]) == 1, path
    assert "did you mean 'format'?" in result.stderr


def test_mistakes_as_json(kvgen_json: Any, wrong: Path) -> None:
    error = kvgen_json("show", wrong, exit_code=2)["error"]
    assert error["type"] == "SpecError"
    found = {item["path"]: item for item in error["diagnostics"]}
    assert found["attention.q_heads"]["value"] == 30 and found["attention.q_heads"]["hint"] == "24 works"


def test_nearest_file_names(kvgen: Any, tmp_path: Path) -> None:
    assert "did you mean examples/llama3-8b-int8.toml" in kvgen("show", "llama3-8b-int8").stderr
    assert "did you mean examples/llama3-8b-int8.toml" in kvgen("show", "examples/llama3-8-int8.toml").stderr
    (tmp_path / "mistral.toml").write_text(WRONG)
    assert f"did you mean {tmp_path}/mistral.toml" in kvgen("show", tmp_path / "mistrl.toml").stderr
    assert "give the path of a TOML spec" in kvgen("show", "zzzzzz").stderr


def test_debug_shows_the_traceback(kvgen_process: Any, wrong: Path) -> None:
    assert "Traceback" not in kvgen_process("show", wrong).stderr
    debug = kvgen_process("show", wrong, KVGEN_LOG="debug")
    assert "Traceback" in debug.stderr and debug.returncode == 2
    assert "error: 6 mistakes in the spec:" in debug.stderr


def test_json_stays_json_when_debugging(kvgen_process: Any, wrong: Path) -> None:
    assert "error" in json.loads(kvgen_process("show", wrong, "--json", KVGEN_LOG="debug").stdout)


def test_faults_of_kvgen_keep_their_traceback() -> None:
    def command() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        guarded(command)()


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt(), INTERRUPTED), (ModuleNotFoundError("No module", name="torch.cuda"), 2)],
)
def test_interrupts_and_missing_packages(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        raise error

    with pytest.raises(typer.Exit) as exit_:
        guarded(command)()
    assert exit_.value.exit_code == code
    said = capsys.readouterr().err
    assert "interrupted" in said or "pip install torch" in said


def test_interrupt_is_clean(repo_root: Path) -> None:
    """Ctrl-C while a command works: no traceback, exit code 130."""
    code = (
        "import time; from kvgen import cli; from kvgen.commands import listing\n"
        "def slow(): print('started', flush=True); time.sleep(60); return []\n"
        "listing.SECTIONS['ops'] = slow\n"
        "import sys; sys.argv = ['kvgen', 'list', 'ops']; cli.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=repo_root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == INTERRUPTED
    assert errors.strip() == "interrupted"


@pytest.mark.parametrize("words", [["explain", INT8], ["list", "--json"], ["--help"]])
def test_closed_pipe(repo_root: Path, words: list[str]) -> None:
    """``kvgen ... | head`` is silent: the reader is gone before the first byte."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "kvgen", *words],
        cwd=repo_root,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )
    os.close(write)
    assert done.stderr == ""
    assert done.returncode != 0


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("explain", "SPEC", "--target", "H100"), "did you mean 'sm_90'?"),
        (("explain", "SPEC", "--op", "Decode"), "did you mean decode?"),
        (("explain", "SPEC", "--stage", "adresses"), "did you mean address?"),
        (("explain", "SPEC", "--pin", "decode.split=64"), "did you mean split_tokens?"),
        (("explain", "SPEC", "--pin", "dekode.tile=64"), "did you mean decode?"),
        (("quality", "int8", "--model", "smollm2", "--q-dtype", "float16"), "did you mean f16?"),
        (("quality", "fp8_e4m3", "--model", "smollm2"), "did you mean fp8?"),
        (("run", "--model", "smollm2", "--pages", "bfloat16", "x"), "did you mean bf16?"),
        (("bench", "SPEC", "--case", "decode-8x4069"), "did you mean decode-8x4096?"),
        (("bench", "SPEC", "--peers", "vlm"), "did you mean vllm"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_options_lead_to_the_nearest_name(
    kvgen: Any, words: tuple[str, ...], hint: str, repo_root: Path
) -> None:
    given = [str(repo_root / "examples/llama3-8b-int8.toml") if word == "SPEC" else word for word in words]
    result = kvgen(*given)
    assert result.exit_code == 2
    assert hint in " ".join(result.stderr.split()), result.stderr
