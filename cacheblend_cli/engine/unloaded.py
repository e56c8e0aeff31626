"""An engine whose model is loaded when something is computed. Imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.outer_ranks import num_ranks
from cacheblend_cli.engine.request.prompts import Prompts
from cacheblend_cli.engine.stored_documents import StoredDocuments
from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.description import Precision, adapter_digest, describe, resolve_dtype
from cacheblend_cli.model.families import read_spec
from cacheblend_cli.model.locate import resolve_model
from cacheblend_cli.model.model_files import checkpoint_files
from cacheblend_cli.model.named import default_model
from cacheblend_cli.model.spec import ModelSpec
from cacheblend_cli.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from cacheblend_cli.engine.engine import Engine

_GPUS = ("nvidia[0-9]*", "nvhost*", "nvmap", "kfd", "dxg")
"""Device files of GPUs: CUDA, also of Jetson and WSL, and ROCm."""


class UnloadedEngine(StoredDocuments):
    """Stores documents, and loads the engine when something is computed."""

    def __init__(
        self, config: EngineConfig, name: str, path: Path, spec: ModelSpec, load: Callable[[], Engine]
    ) -> None:
        self._load = load
        checkpoint_files(path)  # reports another format before a missing tokenizer
        lora = Path(config.lora).expanduser() if config.lora else None
        model = describe(
            spec,
            path,
            name,
            Precision(resolve_dtype(config.dtype, "cpu", spec, path), config.weight_dtype),
            Tokenizer(path, spec.vocab_size, lazy=True),
            lora,
            adapter_digest(lora) if lora else "",
            lambda: self.loaded.model,
        )
        self.prompts = Prompts(model, config)

    @classmethod
    def of(cls, config: EngineConfig, load: Callable[[], Engine], say: Callable[[str], None]) -> UnloadedEngine | None:
        """Return the engine; None if its model is known only when it is loaded: on a GPU, whose dtypes only torch
        knows, on several ranks, and with layers of transformers.

        say: called when a GGUF file is read for the first time. Raises errors of the model's files, as far as these are
        read without weights; `load` raises the others.
        """
        if num_ranks(config.tensor_parallel) > 1 or not _is_cpu(config.device):
            return None
        name = config.model or default_model()
        path = resolve_model(name, say)
        spec = read_spec(path)
        return None if spec.generic else cls(config, name, path, spec, load)

    @cached_property
    def loaded(self) -> Engine:
        """The engine, loaded on first use. Raises UsageError if the model's files were changed meanwhile."""
        engine, own = self._load(), self.prompts.model
        there = engine.model
        if (there.fingerprint, there.tokenizer.identity) != (own.fingerprint, own.tokenizer.identity):
            raise UsageError(f"the files of {own.name} were changed while they were read", "run the command again")
        return engine


def _is_cpu(device: str) -> bool:
    gpus = (file for pattern in _GPUS for file in Path("/dev").glob(pattern))
    return device.startswith("cpu") or (device == "auto" and next(gpus, None) is None)
