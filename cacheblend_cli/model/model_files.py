"""Files of a model directory: text and JSON objects, with errors that name the file.

A directory of another format gets an error that names the format.
"""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

from cacheblend_store.private_files import InsecurePath, read_regular

from cacheblend_cli.errors import NotFoundError, UsageError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
GGUF_INDEX = "gguf.json"
"""Index in a directory that stands for a GGUF file, instead of weights: the file, and its tensors' offsets."""
# All files read of a model besides its weights. adapter_config.json: to identify a directory without config.json.
SMALL_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "adapter_config.json", INDEX,
)  # fmt: skip
SMALL_BYTES = 16 << 20
LARGE_BYTES = 256 << 20
"""Limits of files that are read as text. Large: a tokenizer, or an index with the tensors of every expert."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""Files of a LoRA adapter, as peft writes them."""
OTHER_FORMATS = {
    "*.bin": ("PyTorch weights", "convert them with transformers' save_pretrained, which writes safetensors"),
    "*.pth": ("PyTorch weights", "take the checkpoint that transformers reads, with model.safetensors"),
    "*.safetensors": ("other weights", f"transformers' save_pretrained writes {SINGLE}: that is what is read"),
}


def weight_names(model_dir: Path) -> list[str]:
    """Return the weight files in transformers' order: model.safetensors, else the shards of its index.

    Other files (consolidated.safetensors, an EMA, an adapter, a value head) are not read. Empty if there is neither.
    Raises UsageError on a damaged index.
    """
    if is_there(model_dir / SINGLE):
        return [SINGLE]
    index = model_dir / INDEX
    if not is_there(index):
        return []
    weight_map = read_object(index, LARGE_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise UsageError(f"{index} is not a valid index: it has no weight_map of file names", AGAIN)
    names = sorted(set(weight_map.values()))
    if any(Path(name).name != name for name in names):
        raise UsageError(f"{index} names files outside its directory", AGAIN)
    return names


def is_converted(model_dir: Path) -> bool:
    """Return whether a directory stands for a GGUF file (see `gguf_files`)."""
    return (model_dir / GGUF_INDEX).is_file()


def gguf_file_of(model_dir: Path) -> Path:
    """Return the GGUF file that a converted directory stands for."""
    file = read_object(model_dir / GGUF_INDEX, LARGE_BYTES).get("file")
    if not isinstance(file, str):
        raise UsageError(f"{model_dir / GGUF_INDEX} is not a valid index: it names no file", AGAIN)
    return Path(file)


def checkpoint_files(model_dir: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint, sorted, or the GGUF file of a converted directory. Raises
    NotFoundError if there are none or a shard is missing, UsageError for weights of another format."""
    if is_converted(model_dir):
        return [gguf_file_of(model_dir)]
    names = weight_names(model_dir)
    if not names:
        refuse_other_formats(model_dir)
        raise NotFoundError(
            f"{model_dir} has no weights: neither {SINGLE} nor {INDEX}",
            "cacheblend reads safetensors checkpoints; give the directory that transformers' save_pretrained wrote",
        )
    missing = next((name for name in names if not is_there(model_dir / name)), None)
    if missing is not None:
        raise NotFoundError(f"{model_dir} lacks the shard {missing}", AGAIN)
    return [model_dir / name for name in names]


def refuse_other_formats(model_dir: Path) -> None:
    """Raise UsageError, naming the format, for a directory with only an adapter, or with weights in another format."""
    adapter = model_dir / "adapter_config.json"
    if is_there(adapter):
        base = read_object(adapter).get("base_model_name_or_path", "another model")
        raise UsageError(
            f"{model_dir} holds only a LoRA adapter (adapter_config.json) of {base}",
            f"give --model its model, and --lora {model_dir}",
        )
    for pattern, (kind, hint) in OTHER_FORMATS.items():
        found = sorted(p.name for p in model_dir.glob(pattern))
        if found:
            raise UsageError(f"{model_dir} holds {kind} ({found[0]}), which are not read", hint)


def unused_adapter(model_dir: Path) -> str | None:
    """Return a note about an adapter next to a model's own weights: it may or may not be merged into them."""
    if not (model_dir / "adapter_config.json").is_file():
        return None
    return f"an adapter (adapter_config.json) lies beside the weights of {model_dir}: it is not applied; --lora {model_dir} does"


AGAIN = "fetch the checkpoint again"


def is_there(path: Path) -> bool:
    """Return whether a file exists, following links. Raises UsageError if it is not a regular file: reading a FIFO
    or a device may not end."""
    if path.is_file():
        return True
    if path.exists():
        raise _not_regular(path)
    return False


def read_text(path: Path, most: int = SMALL_BYTES) -> str:
    """Return the file's text as `text_of` does. Raises UsageError as that and `read_bytes` do."""
    return text_of(path, read_bytes(path, most))


def text_of(path: Path, content: bytes) -> str:
    """Return a file's text. Raises UsageError if it is not UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not text: {error}", AGAIN) from error


def read_bytes(path: Path, most: int = SMALL_BYTES) -> bytes:
    """Return the content of a file of text, with line ends converted to newlines. Raises UsageError if it is not a
    regular file, or has more than `most` bytes."""
    try:
        return read_regular(path, most).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    except InsecurePath:
        raise _not_regular(path) from None
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        raise UsageError(f"{path} {error.strerror}, the limit for such a file", AGAIN) from error


def _not_regular(path: Path) -> UsageError:
    return UsageError(f"{path} is not a regular file", "replace it by the file itself, or by a link to it")


def read_object(path: Path, most: int = SMALL_BYTES) -> dict[str, Any]:
    """Return the file's JSON object, an empty one if the file is missing. Raises UsageError for anything else."""
    if not is_there(path):
        return {}
    try:
        data = json.loads(read_text(path, most))
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON: {error}", AGAIN) from error
    except RecursionError:
        raise UsageError(f"{path} is nested too deeply", AGAIN) from None
    if not isinstance(data, dict):
        raise UsageError(f"{path} holds no JSON object", AGAIN)
    return data
