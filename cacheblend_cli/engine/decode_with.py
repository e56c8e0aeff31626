"""Choice of a second decoder (--decode-with, --decode-model). Looks for packages and files, and imports a decoder only
if the settings name it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.errors import NotFoundError, UsageError
from cacheblend_cli.extras import install_hint
from cacheblend_cli.model.loading import LoadedModel

if TYPE_CHECKING:
    from cacheblend_cli.engine.connectors.llama_cpp.decoder import LlamaDecoder

EXTRA, MODULES = "llama-cpp", ("xllamacpp", "llama_cpp")


def llama_decoder(runtime: Runtime) -> LlamaDecoder | None:
    """Return llama.cpp if it is to decode. Raises the errors of `llama_file`."""
    file = llama_file(runtime.config, runtime.model)
    if file is None:
        return None
    from cacheblend_cli.engine.connectors.llama_cpp.decoder import LlamaDecoder

    return LlamaDecoder(runtime, file)


def llama_file(config: EngineConfig, model: LoadedModel) -> Path | None:
    """Return the file that llama.cpp decodes this model with, None if the settings do not name llama.cpp. Raises
    UsageError, NotFoundError if llama.cpp is named and cannot run."""
    if not config.llama_cpp_decodes:
        return None
    own = model.shown_path
    file = Path(config.decode_model).expanduser() if config.decode_model else own if own.suffix == ".gguf" else None
    reason, off = None, "use --decode-with torch"
    if model.spec.recurrent:
        reason = "the states of recurrent layers cannot be handed over", off
    elif file is None:
        reason = "it needs a GGUF file", "give one with --decode-model"
    elif not any(find_spec(module) for module in MODULES):
        reason = "neither xllamacpp nor llama-cpp-python is installed", install_hint(EXTRA)
    elif model.lora is not None:
        reason = "the GGUF file lacks the LoRA adapter", f"merge it into the file, or {off}"
    elif model.decoder.rope.switches_at is not None:
        reason = "the model's RoPE depends on the length of the prompt", off
    elif model.spec.latent is not None:
        reason = "the model keeps latents (MLA), which it stores in another layout", off
    if reason is not None:
        raise UsageError(f"llama.cpp cannot decode: {reason[0]}", reason[1])
    assert file is not None
    if not file.is_file():
        raise NotFoundError(f"{file} does not exist", "check --decode-model")
    return file.resolve()
