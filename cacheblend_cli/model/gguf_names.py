"""GGUF files of a repository by their names, which tell models from other files and state the quantisation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
QUANT = re.compile(r"(?<![a-z0-9])(?:UD-)?(I?Q\d_\w+|TQ\d_\d|B?F16|FP16|FP?32|MXFP4\w*|NVFP4)(?=[-.])", re.I)
READ = re.compile(
    r"Q[458]_[01]|Q[2-68]_K(_(?!R\d)\w+)?|IQ[1-4]_(XXS|XS|S|M|NL)|TQ[12]_0|B?F16|FP16|FP?32|MXFP4(_MOE)?|NVFP4"
)
DEFAULTS = ("Q4_K_M", "Q8_0")
"""Quantisations to take if none is named, as llama.cpp's -hf does."""


def is_model(file: str) -> bool:
    """Return whether a GGUF file is a language model or a part of one: neither the projector of a vision model nor
    statistics for quantising, and inside the repository."""
    *folders, name = file.split("/")
    is_inside = not file.startswith("/") and ".." not in folders
    return is_inside and "mmproj" not in name and not name.endswith(("imatrix.gguf", "imatrix_unsloth.gguf"))


def whole_models(files: Iterable[str]) -> list[str]:
    """Return the files that each hold a whole model."""
    return [file for file in files if file.endswith(".gguf") and is_model(file) and not PART.search(file)]


def quant_of(file: str) -> str:
    """Return the quantisation in a file's name, "" if it has none."""
    found = QUANT.findall(file)
    return found[-1].upper() if found else ""


def is_read(file: str) -> bool:
    """Return False if the name states a type that the gguf package does not dequantise."""
    return not (quant := quant_of(file)) or READ.fullmatch(quant) is not None


def of_quant(files: Iterable[str], quant: str) -> list[str]:
    """Return the files with a quantisation in their names, in upper or lower case."""
    parts = ((file, file.lower().rpartition(quant.lower())) for file in files)
    return [file for file, (before, _, after) in parts if before[-1:] in ("", *"-._/") and after[:1] in ("-", ".")]


def defaults(files: Sequence[str]) -> list[str]:
    """Return the files of the best default quantisation, else the first file."""
    return next((found for quant in DEFAULTS if (found := of_quant(files, quant))), list(files[:1]))
