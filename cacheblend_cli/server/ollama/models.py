"""Descriptions of the server's model in Ollama's form."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from cacheblend_cli.model.model_files import checkpoint_files, is_converted
from cacheblend_cli.server.model_names import check_model, tagged
from cacheblend_cli.server.server_state import ServerState

_FOREVER = "2318-01-01T00:00:00Z"
"""Unload time of a model that stays loaded, as Ollama reports it for keep_alive -1."""
_LEVELS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def timestamp(seconds: float | None = None) -> str:
    """Return an RFC 3339 time in UTC, by default the current one."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def running_models(state: ServerState) -> list[dict[str, Any]]:
    """Return the loaded language model. size: bytes of weights in memory; size_vram: bytes of these on a GPU."""
    decoder, own = state.engine.model.decoder, language_model(state)
    del own["modified_at"]
    vram = 0 if decoder.device.type == "cpu" else decoder.num_parameters * decoder.dtype.itemsize
    return [
        own
        | {
            "size": vram or own["size"],
            "size_vram": vram,
            "expires_at": _FOREVER,
            "context_length": state.engine.context,
        }
    ]


def show(state: ServerState, name: str) -> dict[str, Any]:
    """Describe the language model. Raises ApiError for another name."""
    check_model(state.model, name)
    model, engine, sampling = language_model(state), state.engine, state.sampling
    spec, family = engine.model.decoder.spec, model["details"]["family"]
    defaults = {
        "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p,
        "num_predict": sampling.max_tokens, "num_ctx": engine.context,
    }  # fmt: skip
    info = {
        "general.architecture": family,
        "general.parameter_count": engine.model.decoder.num_parameters,
        f"{family}.context_length": engine.context,
        f"{family}.embedding_length": spec.hidden_size,
        f"{family}.block_count": spec.num_layers,
        f"{family}.attention.head_count": spec.num_heads,
        f"{family}.attention.head_count_kv": spec.num_kv_heads,
        f"{family}.vocab_size": spec.vocab_size,
    }
    capabilities = ["completion", "thinking"] if engine.template.may_reason else ["completion"]
    return {
        "modelfile": "\n".join([f"FROM {model['name']}", *(f"PARAMETER {k} {v}" for k, v in defaults.items())]),
        "parameters": "\n".join(f"{name:<30} {value}" for name, value in defaults.items()),
        "template": engine.model.tokenizer.template_source or "",
        "details": model["details"],
        "model_info": info,
        "capabilities": capabilities,
        "modified_at": model["modified_at"],
    }


def language_model(state: ServerState) -> dict[str, Any]:
    """Describe the model that chats. It is the only one to list: most clients offer every listed one for chats."""
    model = state.engine.model
    family = str(model.decoder.spec.config.get("model_type") or "")
    dtype = str(model.decoder.dtype).removeprefix("torch.")
    level = _LEVELS.get(dtype, dtype) if model.weight_dtype == "auto" else model.weight_dtype.upper()
    kind, count = "gguf" if is_converted(model.path) else "safetensors", model.decoder.num_parameters
    parameters = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"
    size = sum(file.stat().st_size for file in checkpoint_files(model.path))
    details = {"format": kind, "family": family, "parameter_size": parameters, "quantization_level": level}
    return {
        "name": tagged(state.model), "model": tagged(state.model), "modified_at": timestamp(state.started), "size": size,
        "digest": model.fingerprint, "details": {"parent_model": "", **details, "families": [family]},
    }  # fmt: skip
