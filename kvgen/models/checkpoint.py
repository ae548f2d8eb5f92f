"""A checkpoint folder (config.json, *.safetensors, a tokenizer) as a model of the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvgen.errors import ArgumentError, KvgenError, UnsupportedError
from kvgen.models.adaptor import NAME, TransformersModel, register
from kvgen.models.extras import require
from kvgen.models.families import FAMILIES
from kvgen.models.fields import check_tokens
from kvgen.models.folder_files import CONFIG, SMALL, VOCABULARY, check_file, read_json, reason_of
from kvgen.models.shape import ModelShape, check_supported, read_config, shape_of
from kvgen.models.weights import (
    check_headers,
    check_report,
    check_shapes,
    check_tied,
    read_headers,
    weight_files,
)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
"""Either of these makes a tokenizer; a tokenizer_config.json alone does not."""

TOKENIZER_SETTINGS = (CONFIG, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""JSON objects that a tokenizer is made with."""

GENERATION = "generation_config.json"

ADAPTER = "adapter_config.json"


def load_model(folder: Path) -> TransformersModel:
    """The model in ``folder``, computing in f32 on the CPU.

    Nothing is downloaded and no code of the folder runs. Raises ``ArgumentError`` for a folder that is not a
    whole checkpoint, ``UnsupportedError`` for a model that kvgen cannot serve.
    """
    require("transformers", "safetensors")
    config = read_config(folder)
    check_supported(config, folder)
    check_generation(folder, config)
    headers = read_headers(folder, weight_files(folder, config))
    register()
    family = FAMILIES[config["model_type"]]
    with quiet():
        shape = shape_of(config, folder)
        whole = family.config(config, folder)
        check_headers(headers, config, whole, folder)
        try:
            check_shapes(headers, family, whole, folder)
            module, report = _load(family.model_class(), folder, whole)
        except KvgenError:
            raise
        except Exception as error:  # whatever odd files make of somebody else's code
            raise ArgumentError(f"{folder}: the model cannot be read ({reason_of(error)})") from error
    check_report(report, config, whole, folder)
    check_tied(module, folder)
    module.eval()
    return TransformersModel(module, shape)


def _load(model_class: Any, folder: Path, whole: Any) -> Any:
    import torch

    return model_class.from_pretrained(
        folder,
        config=whole,
        dtype=torch.float32,
        attn_implementation=NAME,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )


def read_shape(folder: Path) -> ModelShape:
    """The shape of the model in ``folder``, whose weights are not read; errors as ``load_model``'s."""
    require("transformers")
    config = read_config(folder)
    check_supported(config, folder)
    with quiet():
        return shape_of(config, folder)


def check_generation(folder: Path, config: dict[str, Any]) -> None:
    """Refuse settings beside config.json that would change answers, or name tokens that there are not."""
    if check_file(folder, ADAPTER) is not None:
        raise UnsupportedError(f"{folder / ADAPTER}: adapters are not applied; merge it into the weights")
    found = read_json(folder, GENERATION)
    if found is not None:
        check_tokens(found, folder / GENERATION, config.get("vocab_size"))


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in ``folder``; ``ArgumentError`` where there is none."""
    if not has_tokenizer(folder):
        raise ArgumentError(
            f"{folder}: no tokenizer ({' or '.join(TOKENIZER_FILES)}); give token numbers with --ids"
        )
    require("transformers", "tokenizers")
    from transformers import AutoTokenizer

    _check_tokenizer_files(folder)
    with quiet():
        try:
            made = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            made.decode(made("a b")["input_ids"])  # odd settings show when they are used
        except BaseException as error:
            # The panic of a parser in Rust is no Exception.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ArgumentError(f"{folder}: the tokenizer cannot be read ({reason_of(error)})") from error
    return made


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer lies in ``folder``."""
    return any(check_file(folder, name) is not None for name in TOKENIZER_FILES)


def _check_tokenizer_files(folder: Path) -> None:
    """Refuse files of a tokenizer that lie outside the folder, are too large or are no JSON object."""
    for name in (*TOKENIZER_FILES, "vocab.json", "merges.txt"):
        check_file(folder, name, VOCABULARY)
    for name in TOKENIZER_SETTINGS:
        read_json(folder, name)
    templates = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    for name in ("chat_template.jinja", *(str(path.relative_to(folder)) for path in templates)):
        check_file(folder, name, SMALL)


def stop_tokens(model: TransformersModel) -> tuple[int, ...]:
    """The tokens that end a text, as the checkpoint's generation settings or config name them."""
    for source in (getattr(model.module, "generation_config", None), model.module.config):
        found = getattr(source, "eos_token_id", None)
        if found is not None:
            tokens = found if isinstance(found, list | tuple) else [found]
            return tuple(int(token) for token in tokens if token >= 0)
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
