"""Sentence embeddings: a directory that sentence-transformers saved, read with transformers alone. Nothing of it is run as code."""

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
    """An encoder whose hidden states are pooled to a vector a text. prompts: what stands before a question, and before a text
    that may answer one, by the names that sentence-transformers gives them."""

    def __init__(self, folder: Path) -> None:
        """Raises NotFoundError for modules that are not done here, and for weights that are not in safetensors."""
        kinds = [kind for kind, _ in _modules(folder)]
        if kinds[:2] != ["Transformer", "Pooling"] or set(kinds[2:]) - {"Normalize"}:
            known = "known are Transformer, Pooling and Normalize, in this order"
            raise NotFoundError(f"{folder} is made of {', '.join(kinds)}; {known}", "take another model of embeddings")
        [encoder, pooling] = [folder / path for _, path in _modules(folder)[:2]]
        if not any(encoder.glob("*.safetensors")):
            raise NotFoundError(f"{encoder} has no weights in safetensors", "others may hold code, and are not read")
        self._folder, self._mode = folder, _pooling(pooling / "config.json")
        from transformers import AutoModel, AutoTokenizer

        local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        self._tokenizer = AutoTokenizer.from_pretrained(encoder, **local)
        self._model = AutoModel.from_pretrained(encoder, use_safetensors=True, dtype="float32", **local).eval()
        most = _json(encoder / "sentence_bert_config.json").get("max_seq_length")
        context = getattr(self._model.config, "max_position_embeddings", None)
        self._most = min(filter(None, (most, context, self._tokenizer.model_max_length)))
        prompts = _json(folder / "config_sentence_transformers.json").get("prompts") or {}
        self.prompts = {
            "query": prompts.get("query", ""),
            "document": prompts.get("document") or prompts.get("passage", ""),
        }

    def encode(self, texts: Sequence[str], max_length: int) -> NDArray[np.float32]:
        """[num_texts, dim] fp32. max_length: tokens of each that are read, where the model reads so many."""
        import torch

        found = []
        with torch.inference_mode():
            for start in range(0, len(texts), _BATCH):
                tokens = self._tokenizer(
                    list(texts[start : start + _BATCH]),
                    padding=True,
                    truncation=True,
                    max_length=min(max_length, self._most),
                    return_tensors="pt",
                )
                hidden = self._model(**tokens).last_hidden_state
                found.append(pooled(hidden, tokens["attention_mask"], self._mode))
        vectors: NDArray[np.float32] = torch.cat(found).numpy()
        return vectors

    @cached_property
    def digest(self) -> str:
        """Of all that a vector depends on."""
        import xxhash

        digest = xxhash.xxh3_128()
        for path in sorted([*self._folder.rglob("*.safetensors"), *self._folder.rglob("*.json")]):
            digest.update(path.read_bytes())
        return digest.hexdigest()


def is_sentence_model(folder: Path) -> bool:
    """Whether sentence-transformers saved an encoder there. model2vec's directories have a modules.json, too."""
    return any(kind == "Transformer" for kind, _ in _modules(folder))


def pooled(hidden: Tensor, mask: Tensor, mode: str) -> Tensor:
    """[num_texts, dim] of hidden: [num_texts, num_tokens, dim], and mask: [num_texts, num_tokens], 1 for tokens, 0 for padding."""
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    match mode:
        case "mean":
            return (hidden * weights).sum(1) / weights.sum(1)
        case "max":
            return hidden.masked_fill(weights == 0, float("-inf")).amax(1)
        case "cls":
            place = mask.argmax(-1)
        case _:
            place = mask.cumsum(-1).argmax(-1)  # the first place at which all tokens are counted
    return hidden[range(len(hidden)), place]


def _modules(folder: Path) -> list[tuple[str, str]]:
    """The name of each module's class without its package, and its folder."""
    found = _json(folder / "modules.json")
    return [(str(m["type"]).rpartition(".")[2], str(m["path"])) for m in found] if isinstance(found, list) else []


def _pooling(path: Path) -> str:
    """Raises NotFoundError for a way to pool that is not done here."""
    config = _json(path)
    modes = [_MODES.get(name, name) for name, on in config.items() if name.startswith("pooling_mode_") and on is True]
    if isinstance(config.get("pooling_mode"), str):
        modes = [config["pooling_mode"]]
    if len(modes) != 1 or modes[0] not in _MODES.values() or config.get("include_prompt") is False:
        told = ", ".join(modes) if config.get("include_prompt") is not False else "tokens without the prompt's"
        raise NotFoundError(
            f"{path} pools {told or 'in no way'}", f"known, one at a time: {', '.join(_MODES.values())}"
        )
    return modes[0]


def _json(path: Path) -> Any:
    """{} for a file that is not there, or is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
