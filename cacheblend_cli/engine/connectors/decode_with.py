"""Choice of another engine that decodes (--decode-with, --decode-model). Looks for packages and files, and imports
nothing of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.errors import NotFoundError, UsageError
from cacheblend_cli.extras import install_hint
from cacheblend_cli.model.loading import LoadedModel

if TYPE_CHECKING:
    from cacheblend_cli.engine.connectors.llama_cpp import LlamaCpp

EXTRA, MODULES = "llama-cpp", ("xllamacpp", "llama_cpp")


@dataclass
class DecodeWith:
    """file: what llama.cpp may decode with, None = this engine decodes. measured: only where it is the faster one.
    decided: whether that was settled, which takes loading the file; engine: the result, None = this engine decodes.
    worth_after: tokens of an answer after which loading the file pays, None until it was looked up."""

    file: Path | None = None
    measured: bool = False
    decided: bool = False
    engine: LlamaCpp | None = None
    worth_after: float | None = None
    refused: WeakSet[Any] = field(default_factory=WeakSet)  # sequences that llama.cpp refused, which are decoded here

    @property
    def note(self) -> str | None:
        """Message about the cost of decoding in another engine."""
        if self.file is None or (self.decided and self.engine is None):
            return None
        may = "" if self.engine is not None or not self.measured else " where that is faster"
        size = self.file.stat().st_size / 2**20
        return (
            f"llama.cpp decodes with {self.file.name}{may}: memory holds the weights a second time ({size:,.0f} MiB), and KV of "
            "running answers"
        )


def decode_with(config: EngineConfig, model: LoadedModel) -> DecodeWith:
    """Return the decoder that the settings name for this model. Raises UsageError, NotFoundError if llama.cpp is
    demanded and cannot run."""
    own = model.shown_path
    file = Path(config.decode_model).expanduser() if config.decode_model else own if own.suffix == ".gguf" else None
    reason = None
    if file is None:
        reason = "llama.cpp decodes with GGUF files", "give one with --decode-model"
    elif not any(find_spec(module) for module in MODULES):
        reason = "neither xllamacpp nor llama-cpp-python is installed", install_hint(EXTRA)
    elif model.lora is not None:
        reason = "the GGUF file lacks the LoRA adapter", "merge it into the file, or leave --decode-with out"
    elif model.decoder.rope.switches_at is not None:
        reason = "the model's RoPE depends on the length of the prompt", "leave --decode-with out"
    elif model.spec.latent is not None:
        reason = "the model keeps latents (MLA), which llama.cpp lays out in another way", "leave --decode-with out"
    if config.decode_with == "torch" or (config.decode_with == "auto" and reason is not None):
        return DecodeWith()
    if reason is not None:
        raise UsageError(f"--decode-with llama.cpp: {reason[0]}", reason[1])
    assert file is not None
    if not file.is_file():
        raise NotFoundError(f"there is no file {file}", "check --decode-model")
    return DecodeWith(file.resolve(), measured=config.decode_with == "auto")
