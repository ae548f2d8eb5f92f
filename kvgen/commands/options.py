"""The options that commands share, and what they are turned into."""

from __future__ import annotations

import difflib
import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvgen.errors import ABSENT, ArgumentError, Diagnostic, SpecError, brief
from kvgen.names import told

if TYPE_CHECKING:
    from kvgen.ir import Spec
    from kvgen.ir.schedule import Knob
    from kvgen.library import Library

SpecPath = Annotated[str, typer.Argument(metavar="SPEC", help="A TOML file that describes the cache.")]
TargetName = Annotated[
    str, typer.Option("--target", "-t", metavar="NAME", help="cpu, sm_90, ...; see kvgen list targets.")
]
OpNames = Annotated[
    list[str] | None,
    typer.Option("--op", metavar="OP", help="Only this op; may be given several times, or with commas."),
]
Pins = Annotated[
    list[str] | None,
    typer.Option("--pin", metavar="OP.KNOB=VALUE", help="Fix a knob, e.g. decode.split_tokens=64."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def read_spec(source: str) -> Spec:
    """The spec in the TOML file ``source``; ``SpecError`` names the nearest files where there is none."""
    from kvgen.passes.validate import load_spec

    path = Path(source)
    if path.exists() or path.is_symlink():
        return load_spec(path)
    near = nearest_specs(path)
    hint = f"did you mean {' or '.join(near)}?" if near else "give the path of a TOML spec"
    raise SpecError([Diagnostic(source, ABSENT, "no such file", hint)], unread=True)


def assembled(spec: Spec, target: str, pins: Sequence[str] | None = None) -> Library:
    """The library that ``kvgen.build`` would make, with tuned schedules where there are any, not compiled."""
    from kvgen.builder import assemble
    from kvgen.tune.choose import UntunedWarning

    with warnings.catch_warnings():
        # A default schedule is no news to a user who asks how a kernel is made.
        warnings.simplefilter("ignore", UntunedWarning)
        return assemble(spec, target, tune="cache", schedule=read_pins(pins))


def nearest_specs(missing: Path) -> list[str]:
    """Up to three TOML files in the likely folders whose names resemble that of ``missing``."""
    found = {
        path.stem: path for folder in reversed(spec_folders(missing.parent)) for path in toml_files(folder)
    }
    return [str(found[stem]) for stem in difflib.get_close_matches(missing.stem, found, 3, 0.5)]


def spec_folders(first: Path = Path()) -> list[Path]:
    """Where specs are likely to lie: ``first``, ``examples/`` here, and the examples of a checkout."""
    import kvgen

    here, checkout = Path("examples"), Path(kvgen.__file__).parent.parent / "examples"
    folders = [first, here]
    if not (here.is_dir() and checkout.is_dir() and here.samefile(checkout)):
        folders.append(checkout)
    return [folder for folder in folders if folder.is_dir()]


def toml_files(folder: Path) -> list[Path]:
    """The TOML files of a folder that may be specs, by name."""
    return sorted(path for path in folder.glob("*.toml") if path.name != "pyproject.toml")


def chosen_ops(names: Sequence[str] | None) -> tuple[str, ...]:
    """The ops asked for, in canonical order; all where none was named. ``ArgumentError`` names a near one."""
    from kvgen.ir.plan import OPS

    wanted = [name.strip() for text in names or () for name in text.split(",")]
    for name in wanted:
        if name not in OPS:
            hint = told(name, OPS)
            raise ArgumentError(f"--op {name}: no such op; {hint}The ops are {', '.join(OPS)}")
    return tuple(op for op in OPS if op in wanted) if wanted else OPS


def read_pins(texts: Sequence[str] | None) -> dict[str, dict[str, Knob]]:
    """``["decode.split_tokens=64"]`` as ``{"decode": {"split_tokens": 64}}``. ``build`` checks the names."""
    pins: dict[str, dict[str, Knob]] = {}
    for text in texts or ():
        match = re.fullmatch(r"\s*(\w+)\.(\w+)\s*=\s*(\S+)\s*", text)
        if match is None:
            raise ArgumentError(f"--pin {text}: write op.knob=value, for example decode.split_tokens=64")
        op, knob, value = match.groups()
        pins.setdefault(op, {})[knob] = _knob(value)
    return pins


def read_text(name: str, text: str) -> str:
    """An argument that is a text, as UTF-8 whatever the locale; ``ArgumentError`` where it is none.

    Python takes bytes that the locale lacks for lone surrogates, which no tokenizer knows.
    """
    try:
        return os.fsencode(text).decode()
    except UnicodeDecodeError as error:
        reason = f"byte 0x{error.object[error.start]:02x} at {error.start} is not UTF-8"
    except UnicodeEncodeError as error:
        reason = f"{error.object[error.start]!a} at {error.start} is no character"
    raise ArgumentError(f"{name} {brief(text)}: {reason}; give UTF-8 text")


def _knob(text: str) -> Knob:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else text
