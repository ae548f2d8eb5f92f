"""Files of a checkpoint folder: inside it, regular, and read only as far as a bound allows.

A checkpoint comes from somebody else. Its JSON names files, and its files may be links: both must stay
inside the folder. Hugging Face's own cache is the one layout whose links lead out of it (those of
``snapshots/REVISION`` to ``../../blobs``); there the folder of the whole model is the border.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvgen import bounded
from kvgen.errors import ArgumentError

CONFIG = "config.json"

SMALL = 4 << 20
"""Most bytes of a settings file (config.json and its kin)."""

LARGE = 64 << 20
"""Most bytes of an index of weights; the largest known ones have 10 MB."""

VOCABULARY = 256 << 20
"""Most bytes of a vocabulary."""

MOST_DIGITS = 400
"""Of an integer; a float of f64 has at most 309."""

FILE_KEYS = re.compile(r"(.*_)?files?|transformers_weights|init_inputs|vocab|merges")
"""Keys of settings whose strings are names of files to their readers."""

UNREAD = "special_tokens_map_file"
"""A key of this kind that nobody reads: many tokenizers still hold a path of the machine that made them."""


def shown(value: Any) -> str:
    """A value as JSON, shortened: what stands in a message."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else f"{text[:48]} ... ({len(text):,} characters)"


def named(word: str) -> str:
    """A name that somebody else chose: a plain one as it is, any other as JSON."""
    return word if re.fullmatch(r"[\w.-]{1,100}", word, re.ASCII) else shown(word)


def reason_of(error: BaseException) -> str:
    """What somebody else's error says, in one line of bounded length."""
    text = " ".join(str(error).split())
    text = text if len(text) <= 300 else f"{text[:300]} ..."
    if isinstance(error, OSError | ValueError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def refusal(path: Path, key: str, value: Any, reason: str, hint: str) -> ArgumentError:
    """The error for one entry of a JSON file."""
    return ArgumentError(f"{path}: {key} = {shown(value)}: {reason}; {hint}")


def border(folder: Path) -> Path:
    """The folder that links of ``folder`` may not leave."""
    real = folder.resolve()
    model = real.parent.parent
    hub = real.parent.name == "snapshots" and (model / "blobs").is_dir()
    return model if hub else real


def check_name(folder: Path, where: str, name: Any) -> None:
    """Refuse the name of a file, which ``where`` gives, if it leads out of ``folder``."""
    hint = "give the name of a file inside the folder"
    if not isinstance(name, str) or not 0 < len(name) < 256 or not name.isprintable():
        raise ArgumentError(f"{folder}: {where} = {shown(name)}: not the name of a file; {hint}")
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ArgumentError(f"{folder}: {where} = {shown(name)}: leads out of the folder; {hint}")


def check_file(folder: Path, name: str, limit: int | None = None) -> Path | None:
    """The file ``name`` of ``folder``, or None where it has none.

    Raises ``ArgumentError`` for a link that leads out of the folder, for what is no regular file (a device
    would never end) and for more than ``limit`` bytes.
    """
    path = folder / name
    try:
        real = path.resolve(strict=True)
        found = real.stat()
    except FileNotFoundError:
        if path.is_symlink():
            raise ArgumentError(f"{path}: a link to nothing; download the file it points to") from None
        return None
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
        raise ArgumentError(f"{path}: cannot be read ({error}); give a readable file") from None
    if not real.is_relative_to(border(folder)):
        raise ArgumentError(f"{path}: a link that leads out of the folder, to {real}; copy the file instead")
    if not stat.S_ISREG(found.st_mode):
        raise ArgumentError(f"{path}: not an ordinary file; devices, pipes and sockets are not read")
    if limit is not None and found.st_size > limit:
        raise ArgumentError(f"{path}: {found.st_size:,} bytes; at most {limit:,} are read")
    return path


def read_json(folder: Path, name: str, limit: int = SMALL) -> dict[str, Any] | None:
    """The JSON object in a file of ``folder``; None where there is no such file.

    Raises ``ArgumentError`` as ``check_file``, for what is no JSON object, and for names of files that lead
    out of the folder. Bounds are checked before parsing.
    """
    path = check_file(folder, name, limit)
    if path is None:
        return None
    try:
        text = bounded.read(path, limit).decode("utf-8")
        found = bounded.parse_json(text, object_pairs_hook=_pairs, parse_int=_integer)
    except OSError as error:
        raise ArgumentError(f"{path}: cannot be read ({error.strerror}); make it readable") from None
    except bounded.RefusedError as error:
        raise ArgumentError(f"{path}: {error}; write one JSON object") from None
    except UnicodeDecodeError as error:
        wrong = f"byte {error.start} is {error.object[error.start]:#x}"
        raise ArgumentError(f"{path}: not UTF-8 ({wrong}); save it as UTF-8") from None
    except ValueError as error:
        raise ArgumentError(f"{path}: not JSON ({error}); write one JSON object") from None
    if not isinstance(found, dict):
        raise ArgumentError(f"{path}: not a JSON object, but {shown(found)}; write {{ ... }}")
    for key, value in _file_names(found):
        check_name(folder, f"{name}: {named(key)}", value)
    return found


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; ``ValueError`` where a key comes twice, for readers would differ in which one counts."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"the key {shown(key)} appears twice")
        made[key] = value
    return made


def _integer(digits: str) -> int:
    """A whole number; ``ValueError`` for one that is no size, which Python would be slow to read."""
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits")
    return int(digits)


def _file_names(settings: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The entries of settings that name files."""
    for key, value in settings.items():
        if FILE_KEYS.fullmatch(key) and key != UNREAD:
            yield from (
                (key, name)
                for name in (value if isinstance(value, list) else [value])
                if isinstance(name, str)
            )
