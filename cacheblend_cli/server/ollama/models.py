"""The models of this server as Ollama's API describes them: the one that answers, and the one that embeds."""

from __future__ import annotations

from typing import Any

from cacheblend_cli.model.model_files import checkpoint_files, is_converted
from cacheblend_cli.server import embedding
from cacheblend_cli.server.errors import ApiError
from cacheblend_cli.server.ollama.replies import timestamp
from cacheblend_cli.server.state import ServerState

_LATEST = ":latest"
_FOREVER = "2318-01-01T00:00:00Z"
"""When a model is unloaded that stays: what Ollama tells for keep_alive -1 is as far away."""
_LEVELS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def tagged(name: str) -> str:
    """The name with a tag, which Ollama's always have."""
    return name if ":" in name else name + _LATEST


def is_named(own: str, name: str) -> bool:
    """Return whether the name, with or without a tag, is that model's."""
    return tagged(name) in (tagged(own), tagged("cacheblend"))


def check(host: ServerState, name: str) -> None:
    """Raises ApiError for a model that does not answer here."""
    if not is_named(host.model, name):
        raise _unknown(name)


def listed(host: ServerState) -> list[dict[str, Any]]:
    models = [_answering(host)]
    if (own := embedding.model_of(host)) is not None:
        models.append(_embedding(host, own))
    return models


def running(host: ServerState) -> list[dict[str, Any]]:
    """The answering model; size: bytes of its weights in memory, size_vram: of these on a GPU."""
    decoder, own = host.engine.model.decoder, _answering(host)
    size = decoder.num_parameters * (1 if host.engine.model.weight_dtype == "int8" else decoder.dtype.itemsize)
    del own["modified_at"]
    vram = 0 if decoder.device.type == "cpu" else size
    return [own | {"size": size, "size_vram": vram, "expires_at": _FOREVER, "context_length": host.engine.context}]


def shown(host: ServerState, name: str) -> dict[str, Any]:
    """Raises ApiError for a model that is not here."""
    embedder = embedding.model_of(host)
    if embedder is not None and tagged(name) == tagged(embedding.name_of(host)):
        return _shown_embedding(_embedding(host, embedder), embedder)
    check(host, name)
    return _shown(host, _answering(host))


def _answering(host: ServerState) -> dict[str, Any]:
    model = host.engine.model
    family = str(host.engine.model.decoder.spec.config.get("model_type") or "")
    dtype = str(model.decoder.dtype).removeprefix("torch.")
    details = {
        "parent_model": "",
        "format": "gguf" if is_converted(model.path) else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _count(model.decoder.num_parameters),
        "quantization_level": "INT8" if model.weight_dtype == "int8" else _LEVELS.get(dtype, dtype),
    }
    size = sum(file.stat().st_size for file in checkpoint_files(model.path))
    return _listed(host, host.model, size, model.fingerprint, details)


def _embedding(host: ServerState, own: embedding.Embedder) -> dict[str, Any]:
    details = {
        "parent_model": "",
        "format": "safetensors",
        "family": "embedding",
        "families": ["embedding"],
        "parameter_size": "",
        "quantization_level": "",
    }
    return _listed(host, embedding.name_of(host), 0, own.digest, details)


def _listed(host: ServerState, name: str, size: int, digest: str, details: dict[str, Any]) -> dict[str, Any]:
    """size: bytes of the files. digest: of all that the model's KV or its vectors depend on."""
    return {
        "name": tagged(name),
        "model": tagged(name),
        "modified_at": timestamp(host.started),
        "size": size,
        "digest": digest,
        "details": details,
    }


def _shown(host: ServerState, model: dict[str, Any]) -> dict[str, Any]:
    """template: jinja's, as the model has it."""
    engine, sampling = host.engine, host.sampling
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
    return {
        "modelfile": "\n".join([f"FROM {model['name']}", *(f"PARAMETER {k} {v}" for k, v in defaults.items())]),
        "parameters": "\n".join(f"{name:<30} {value}" for name, value in defaults.items()),
        "template": engine.model.tokenizer.template_source or "",
        "details": model["details"],
        "model_info": info,
        "capabilities": ["completion", "thinking"] if engine.template.may_reason else ["completion"],
        "modified_at": model["modified_at"],
    }


def _shown_embedding(model: dict[str, Any], own: embedding.Embedder) -> dict[str, Any]:
    info = {
        "general.architecture": "embedding",
        "embedding.embedding_length": own.dim,
        "embedding.context_length": own.most_tokens,
    }
    return {
        "modelfile": f"FROM {model['name']}",
        "parameters": "",
        "template": "",
        "details": model["details"],
        "model_info": info,
        "capabilities": ["embedding"],
        "modified_at": model["modified_at"],
    }


def _count(parameters: int) -> str:
    """Format a count as Ollama does: 134.52M, 8.0B."""
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.2f}M"


def _unknown(name: str) -> ApiError:
    return ApiError(404, f"model {name[:80]!r} not found", param="model", code="model_not_found")
