"""The weights of a checkpoint before they are loaded: which files, and what their headers say.

Headers name every tensor with its shape, so a config.json that asks for other sizes than there are weights is
refused before anything of that size is made, and weights that the model's code would leave out are refused
by name: a bias that nobody adds changes every answer.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgen.errors import ArgumentError
from kvgen.models.families import Family
from kvgen.models.folder_files import (
    CONFIG,
    LARGE,
    check_file,
    check_name,
    named,
    read_json,
    reason_of,
    refusal,
    shown,
)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES = ("F64", "F32", "F16", "BF16")
"""Types of weights that need no scale, as safetensors calls them."""

LEFTOVERS = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")
"""Tensors of old checkpoints that say what config.json says."""

LAYER = re.compile(r"(?:.*\.)?layers\.(\d{1,9})\..*")


@dataclass(frozen=True)
class Header:
    """What a file says about one tensor."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def weight_files(folder: Path, config: dict[str, Any]) -> list[str]:
    """The names of the files that transformers reads weights from, each of them there and inside the folder.

    ``ArgumentError`` where there are none, or an index names what is missing or lies outside.
    """
    other = config.get("transformers_weights")
    if other is not None:
        hint = "give the file that name, and leave the key out"
        raise refusal(
            folder / CONFIG, "transformers_weights", other, f"only {SINGLE} or {INDEX} is read", hint
        )
    if check_file(folder, SINGLE) is not None:
        return [SINGLE]
    found = read_json(folder, INDEX, LARGE)
    if found is None:
        raise ArgumentError(
            f"{folder}: no *.safetensors by the name of {SINGLE} or {INDEX}; no other is read"
        )
    table = found.get("weight_map")
    if not isinstance(table, dict) or not table:
        raise refusal(
            folder / INDEX, "weight_map", table, "not a table", "give each weight the name of its file"
        )
    for name, file in table.items():
        check_name(folder, f"{INDEX}: weight_map.{named(name)}", file)
    names = sorted(set(table.values()))
    for file in names:
        if check_file(folder, file) is None:
            raise ArgumentError(f"{folder / file}: cannot be read: {INDEX} names it, but it is missing")
    return names


def read_headers(folder: Path, files: Iterable[str]) -> dict[str, Header]:
    """Every tensor of ``files`` by its name; ``ArgumentError`` for a file that is no safetensors."""
    from safetensors import safe_open

    found: dict[str, Header] = {}
    for file in files:
        try:
            with safe_open(folder / file, framework="numpy") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no dict
                    if name in found:
                        raise ArgumentError(
                            f"{folder / file}: {named(name)} is in {found[name].file} as well"
                        )
                    part = opened.get_slice(name)
                    found[name] = Header(file, part.get_dtype(), tuple(part.get_shape()))
        except ArgumentError:
            raise
        except Exception as error:
            raise ArgumentError(f"{folder / file}: cannot be read ({reason_of(error)})") from error
    return found


def check_headers(headers: dict[str, Header], config: dict[str, Any], whole: Any, folder: Path) -> None:
    """Refuse weights that do not fit a config.json; ``whole`` is transformers' form of it."""
    _check_layers(headers, config, whole, folder)
    for name, header in headers.items():
        if header.dtype not in DTYPES and not LEFTOVERS.fullmatch(name):
            hint = f"give weights in {', '.join(DTYPES)}"
            raise ArgumentError(f"{folder / header.file}: {named(name)} is stored in {header.dtype}; {hint}")
        if name.endswith("embed_tokens.weight"):
            for key, there in zip(("vocab_size", "hidden_size"), header.shape, strict=False):
                if getattr(whole, key) != there:
                    reason = f"{named(name)} has {there:,}"
                    raise refusal(folder / CONFIG, key, getattr(whole, key), reason, f"give {there}")


def _check_layers(headers: dict[str, Header], config: dict[str, Any], whole: Any, folder: Path) -> None:
    """Refuse more or fewer layers than a config.json counts."""
    numbers = {int(found.group(1)): name for name in headers if (found := LAYER.fullmatch(name))}
    there, counted = max(numbers, default=-1) + 1, whole.num_hidden_layers
    # DeepSeek V3 has layers after the last that predict further tokens; transformers leaves them out too.
    ahead = _ahead(config, whole)
    if there < counted or there > counted + ahead:
        reason = f"the weights have {there} layers"
        raise refusal(folder / CONFIG, "num_hidden_layers", counted, reason, f"give {there}")


def _ahead(config: dict[str, Any], whole: Any) -> int:
    if config["model_type"] != "deepseek_v3":
        return 0
    return int(config.get("num_nextn_predict_layers", getattr(whole, "num_mtp_layers", 1)) or 0)


def check_shapes(headers: dict[str, Header], family: Family, whole: Any, folder: Path) -> None:
    """Refuse weights of other shapes than the model's, and a model of far more numbers than there are.

    The model is made without memory (on torch's device ``meta``). The second check is what stands between a
    wrong config.json and gigabytes: transformers makes up, and then reports, what it does not find.
    """
    import torch

    with torch.device("meta"):
        module = family.model_class()(copy.deepcopy(whole))
    for name, tensor in module.state_dict().items():
        header = headers.get(name)
        if header is not None and header.shape != tuple(tensor.shape):
            raise ArgumentError(
                f"{folder / header.file}: {named(name)} has shape {list(header.shape)}, "
                f"but {CONFIG} makes it {list(tensor.shape)}; one of the two is another model's"
            )
    wanted = sum(parameter.numel() for parameter in module.parameters())
    there = sum(_count(header.shape) for header in headers.values())
    if wanted > 2 * there + (1 << 20):
        raise ArgumentError(
            f"{folder / CONFIG}: a model of {wanted:,} numbers, but the weights have {there:,}; "
            "one of the two is another model's"
        )


def _count(shape: tuple[int, ...]) -> int:
    made = 1
    for size in shape:
        made *= size
    return made


def check_report(report: dict[str, Any], config: dict[str, Any], whole: Any, folder: Path) -> None:
    """Refuse what transformers' report of a load says was made up, left out or did not fit."""
    for kind in ("missing_keys", "mismatched_keys"):
        names = sorted(str(key) for key in report.get(kind) or ())
        if names:
            raise ArgumentError(
                f"{folder}: {len(names)} weights are {kind.removesuffix('_keys')}, first {named(names[0])}"
            )
    left = sorted(set(_left_out(report.get("unexpected_keys") or (), config, whole)))
    if left:
        raise ArgumentError(
            f"{folder}: {len(left)} weights are unknown to this model's code, first {named(left[0])}; "
            f"they would be left out: check {CONFIG}, for example attention_bias, or remove them"
        )
    for kind in ("error_msgs", "conversion_errors"):
        if report.get(kind):
            raise ArgumentError(f"{folder}: the weights cannot be loaded ({shown(str(report[kind]))})")


def _left_out(names: Iterable[Any], config: dict[str, Any], whole: Any) -> Iterator[str]:
    """The names among those that no model's code asked for which mean something."""
    for name in map(str, names):
        layer = LAYER.fullmatch(name)
        beyond = layer and int(layer.group(1)) >= whole.num_hidden_layers  # checked by its number before
        if not (LEFTOVERS.fullmatch(name) or beyond):
            yield name


def check_tied(module: Any, folder: Path) -> None:
    """Refuse a head of its own where a config.json says that it is the embedding."""
    import torch

    head, embedding = module.lm_head.weight, module.get_input_embeddings().weight
    if module.config.tie_word_embeddings and head is not embedding and not torch.equal(head, embedding):
        raise refusal(
            folder / CONFIG,
            "tie_word_embeddings",
            True,
            "lm_head.weight differs from the embedding",
            "give false",
        )
