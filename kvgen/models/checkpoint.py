"""A checkpoint folder (config.json, *.safetensors, a tokenizer) as a model of the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvgen.errors import ArgumentError
from kvgen.models.adaptor import NAME, TransformersModel, register
from kvgen.models.extras import require
from kvgen.models.families import FAMILIES
from kvgen.models.shape import check_supported, read_config, shape_of

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
"""Either of these makes a tokenizer; a tokenizer_config.json alone does not."""


def load_model(folder: Path) -> TransformersModel:
    """The model in ``folder``, computing in f32 on the CPU.

    Nothing is downloaded and no code of the folder runs. Raises ``ArgumentError`` for a folder that is not a
    whole checkpoint, ``UnsupportedError`` for a model that kvgen cannot serve.
    """
    require("transformers", "safetensors")
    config = read_config(folder)
    check_supported(config, folder)
    shape = shape_of(config, folder)
    if not any(folder.glob("*.safetensors")):
        raise ArgumentError(f"{folder}: no *.safetensors; weights in other formats are not read")
    register()
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    family = FAMILIES[config["model_type"]]
    with quiet():
        try:
            module, report = family.model_class().from_pretrained(
                folder,
                config=family.config(config, folder),
                dtype=torch.float32,
                attn_implementation=NAME,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, KeyError, SafetensorError, StrictDataclassError) as error:
            raise ArgumentError(f"{folder}: the model cannot be read ({_reason(error)})") from error
    # transformers makes up what it does not find.
    for kind in ("missing_keys", "mismatched_keys"):
        if report.get(kind):
            names = sorted(str(key) for key in report[kind])
            raise ArgumentError(
                f"{folder}: {len(names)} weights are {kind.removesuffix('_keys')}, first {names[0]}"
            )
    module.eval()
    return TransformersModel(module, shape)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in ``folder``; ``ArgumentError`` where there is none."""
    if not has_tokenizer(folder):
        raise ArgumentError(
            f"{folder}: no tokenizer ({' or '.join(TOKENIZER_FILES)}); give token numbers with --ids"
        )
    require("transformers", "tokenizers")
    from transformers import AutoTokenizer

    with quiet():
        try:
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
            raise ArgumentError(f"{folder}: the tokenizer cannot be read ({_reason(error)})") from error


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer lies in ``folder``."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def stop_tokens(model: TransformersModel) -> tuple[int, ...]:
    """The tokens that end a text, as the checkpoint's generation settings or config name them."""
    for source in (getattr(model.module, "generation_config", None), model.module.config):
        found = getattr(source, "eos_token_id", None)
        if found is not None:
            return tuple(found) if isinstance(found, list | tuple) else (int(found),)
    return ()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """transformers without progress bars and advice; what matters is raised."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _reason(error: Exception) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split()) or type(error).__name__
