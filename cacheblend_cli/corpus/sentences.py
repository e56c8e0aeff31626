"""Sentence embeddings from a sentence-transformers directory, read with transformers only. Code in it is not run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_cli.errors import NotFoundError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

_BATCH = 32  # texts
_MODES = {
    "pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
}  # fmt: skip


class SentenceModel:
    """An encoder with pooled hidden states: one vector per text.

    prompts: "query" and "document" -> text to put before one. most_tokens: maximum tokens read per text.
    """

    def __init__(self, folder: Path) -> None:
        """Raises NotFoundError for unsupported modules and for weights that are not in safetensors."""
        kinds = [kind for kind, _ in _modules(folder)]
        if kinds[:2] != ["Transformer", "Pooling"] or set(kinds[2:]) - {"Normalize"}:
            known = "known are Transformer, Pooling and Normalize, in this order"
            raise NotFoundError(f"{folder} is made of {', '.join(kinds)}; {known}", "use another embedding model")
        [encoder, pooling] = [folder / path for _, path in _modules(folder)[:2]]
        if not any(encoder.glob("*.safetensors")):
            raise NotFoundError(
                f"{encoder} has no weights in safetensors", "other formats can hold code and are not read"
            )
        self._folder, self._mode = folder, _pooling(pooling / "config.json")
        from transformers import AutoModel, AutoTokenizer

        local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        self._tokenizer = AutoTokenizer.from_pretrained(encoder, **local)
        self._model = AutoModel.from_pretrained(encoder, use_safetensors=True, dtype="float32", **local).eval()
        most = _json(encoder / "sentence_bert_config.json").get("max_seq_length")
        context = getattr(self._model.config, "max_position_embeddings", None)
        self.most_tokens = min(filter(None, (most, context, self._tokenizer.model_max_length)))
        prompts = _json(folder / "config_sentence_transformers.json").get("prompts") or {}
        self.prompts = {
            "query": prompts.get("query", ""),
            "document": prompts.get("document") or prompts.get("passage", ""),
        }

    def encode(self, texts: Sequence[str], max_length: int) -> NDArray[np.float32]:
        """Return [num_texts, dim] fp32. max_length: tokens to read per text, capped by the model's own limit."""
        import torch

        found = []
        with torch.inference_mode():
            for start in range(0, len(texts), _BATCH):
                tokens = self._tokenizer(
                    list(texts[start : start + _BATCH]),
                    padding=True,
                    truncation=True,
                    max_length=min(max_length, self.most_tokens),
                    return_tensors="pt",
                )
                hidden = self._model(**tokens).last_hidden_state
                found.append(pooled(hidden, tokens["attention_mask"], self._mode))
        vectors: NDArray[np.float32] = torch.cat(found).numpy()
        return vectors

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, with special tokens, not truncated."""
        ids: list[list[int]] = self._tokenizer(list(texts), verbose=False)["input_ids"]
        return ids

    @property
    def dim(self) -> int:
        return int(self._model.config.hidden_size)

    @cached_property
    def digest(self) -> str:
        """Digest of weights and configuration."""
        import xxhash

        digest = xxhash.xxh3_128()
        for path in sorted([*self._folder.rglob("*.safetensors"), *self._folder.rglob("*.json")]):
            digest.update(path.read_bytes())
        return digest.hexdigest()


def is_sentence_model(folder: Path) -> bool:
    """Return whether a directory has an encoder saved by sentence-transformers. model2vec has a modules.json, too."""
    return any(kind == "Transformer" for kind, _ in _modules(folder))


def pooled(hidden: Tensor, mask: Tensor, mode: str) -> Tensor:
    """Pool hidden [num_texts, num_tokens, dim] to [num_texts, dim]. mask: [num_texts, num_tokens], 0 for padding."""
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    match mode:
        case "mean":
            return (hidden * weights).sum(1) / weights.sum(1)
        case "max":
            return hidden.masked_fill(weights == 0, float("-inf")).amax(1)
        case "cls":
            place = mask.argmax(-1)
        case _:
            place = mask.cumsum(-1).argmax(-1)  # last token: argmax returns the first position of the full count
    return hidden[range(len(hidden)), place]


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Return (class name without package, folder) of each module."""
    found = _json(folder / "modules.json")
    return [(str(m["type"]).rpartition(".")[2], str(m["path"])) for m in found] if isinstance(found, list) else []


def _pooling(path: Path) -> str:
    """Return the pooling mode. Raises NotFoundError for an unsupported one."""
    config = _json(path)
    modes = [_MODES.get(name, name) for name, on in config.items() if name.startswith("pooling_mode_") and on is True]
    if isinstance(config.get("pooling_mode"), str):
        modes = [config["pooling_mode"]]
    if len(modes) != 1 or modes[0] not in _MODES.values() or config.get("include_prompt") is False:
        described = ", ".join(modes) if config.get("include_prompt") is not False else "tokens without the prompt's"
        raise NotFoundError(
            f"{path} has unsupported pooling: {described or 'none'}",
            f"known, one at a time: {', '.join(_MODES.values())}",
        )
    return modes[0]


def _json(path: Path) -> Any:
    """Return the parsed file, {} if it is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
