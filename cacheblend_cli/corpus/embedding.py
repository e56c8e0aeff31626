"""Embedding models for search by meaning.

Static models are the default: a text's vector is the mean of its token vectors. Encoders in a sentence-transformers
directory are read with transformers only; code in the directory is not run.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_store.private_files import read_regular

from cacheblend_cli.errors import NotFoundError
from cacheblend_cli.extras import require
from cacheblend_cli.model.model_files import SMALL_BYTES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from tokenizers import Tokenizer
    from torch import Tensor


_WORDLLAMA = ("weights/l2_supercat_256.safetensors", "tokenizers/l2_supercat_tokenizer_config.json")
_MOST_TOKENS = 2048  # tokens read per text; a chunk is shorter
_FEW = 64  # below this number of texts, converting the whole table to fp32 does not pay


class TokenMeans:
    """Static embeddings, computed as in model2vec's StaticModel. Importing model2vec takes longer than reading the
    weights.

    embedding: [num_tokens, dim].
    """

    def __init__(self, embedding: NDArray[Any], tokenizer: Tokenizer) -> None:
        self.embedding, self._tokenizer = embedding, tokenizer
        self._unknown = tokenizer.token_to_id("<unk>")

    def encode(self, texts: Sequence[str], max_length: int) -> NDArray[np.float32]:
        """Return [num_texts, dim] fp32; zeros for a text without known tokens. max_length: tokens to read per text."""
        import numpy as np

        table = self.embedding if len(texts) < _FEW else self._float32
        means = np.zeros((len(texts), table.shape[1]), np.float32)
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        for mean, encoding in zip(means, encodings, strict=True):
            if ids := [i for i in encoding.ids[:max_length] if i != self._unknown]:
                table.take(ids, axis=0).astype(np.float32, copy=False).mean(axis=0, out=mean)
        return means

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text's known tokens."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [[i for i in encoding.ids if i != self._unknown] for encoding in encodings]

    @property
    def dim(self) -> int:
        return int(self.embedding.shape[1])

    @cached_property
    def _float32(self) -> NDArray[np.float32]:
        return self.embedding.astype("float32")


class Embedder:
    """A thread-safe embedding model. name: directory, hub id or package that it was loaded from."""

    def __init__(self, name: str, model: Any) -> None:
        self.name, self._model = name, model
        self._one_at_a_time = threading.Lock()  # tokenizers that pad and truncate are changed by every call

    def embed(self, texts: Sequence[str], *, question: bool = False) -> NDArray[np.float32]:
        """Return vectors of length 1, [num_texts, dim] fp32; zeros for a text without known tokens.

        question: use the model's query prompt, if it has one, instead of its document prompt.
        """
        import numpy as np

        with self._one_at_a_time:
            encoded = self._model.encode(self._prompted(texts, question), max_length=_MOST_TOKENS)
        vectors = np.asarray(encoded, dtype=np.float32)
        norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
        return np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0)

    def num_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of each text with the document prompt, including tokens past the length limit."""
        with self._one_at_a_time:
            return [len(ids) for ids in self._model.tokenize(self._prompted(texts))]

    @property
    def dim(self) -> int:
        """Length of a vector."""
        return int(self._model.dim)

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens that `embed` reads of a text."""
        return min(_MOST_TOKENS, getattr(self._model, "most_tokens", _MOST_TOKENS))

    def _prompted(self, texts: Sequence[str], question: bool = False) -> list[str]:
        before = getattr(self._model, "prompts", {}).get("query" if question else "document", "")
        return [before + text for text in texts]

    @cached_property
    def digest(self) -> str:
        """Digest of the weights. Vectors of different weights cannot be compared."""
        import numpy as np
        import xxhash

        if own := getattr(self._model, "digest", None):
            return str(own)
        return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(self._model.embedding).data)


def find_embedder(name: str = "") -> Embedder | None:
    """Load embeddings by name: a model2vec directory or hub id, or a sentence-transformers directory.

    Without a name, load the small English embeddings of the package wordllama, or return None if it is not installed.
    Raises NotFoundError if the weights do not exist, UsageError if they need model2vec and it is not installed.
    """
    if not name:
        spec = find_spec("wordllama")
        return None if spec is None else _bundled(next(iter(spec.submodule_search_locations or ()), ""))
    return _named(name)


@lru_cache(maxsize=2)
def _named(name: str) -> Embedder:
    folder = Path(name).expanduser()
    hint = "name a directory saved by model2vec or sentence-transformers, or a model2vec Hugging Face id"
    if is_sentence_model(folder):
        try:
            return Embedder(name, SentenceModel(folder))
        except (OSError, ValueError) as error:  # missing or damaged files
            raise NotFoundError(f"{name} does not hold a sentence-transformers model: {error}", hint) from error
    require(f"--embeddings {name}", "meaning", "model2vec")
    from model2vec import StaticModel

    local = folder.is_dir()
    try:
        return Embedder(name, StaticModel.from_pretrained(str(folder) if local else name))
    except Exception as error:  # any error of the hub, the network, the loader or the file formats
        what = "does not hold a model2vec model" if local else "is not a directory, and the hub does not have it"
        raise NotFoundError(f"{name} {what}: {error}", hint) from error


@lru_cache(maxsize=1)
def _bundled(folder: str) -> Embedder | None:
    weights, tokenizer = (Path(folder) / part for part in _WORDLLAMA)
    if not (weights.is_file() and tokenizer.is_file()):
        return None
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    [vectors] = load_file(weights).values()
    return Embedder("wordllama", TokenMeans(vectors, Tokenizer.from_file(str(tokenizer))))


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
        document = prompts.get("document") or prompts.get("passage", "")
        self.prompts = {"query": prompts.get("query", ""), "document": document}

    def encode(self, texts: Sequence[str], max_length: int) -> NDArray[np.float32]:
        """Return [num_texts, dim] fp32. max_length: tokens to read per text, capped by the model's own limit."""
        import torch

        found, most = [], min(max_length, self.most_tokens)
        with torch.inference_mode():
            for start in range(0, len(texts), _BATCH):
                batch = list(texts[start : start + _BATCH])
                tokens = self._tokenizer(batch, padding=True, truncation=True, max_length=most, return_tensors="pt")
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
    if config.get("include_prompt") is False:
        modes = ["tokens without the prompt's"]
    if len(modes) != 1 or modes[0] not in _MODES.values():
        raise NotFoundError(
            f"{path} has unsupported pooling: {', '.join(modes) or 'none'}",
            f"known, one at a time: {', '.join(_MODES.values())}",
        )
    return modes[0]


def _json(path: Path) -> Any:
    """Return the parsed file, {} if it is missing or not JSON."""
    try:
        return json.loads(read_regular(path, SMALL_BYTES))
    except (OSError, ValueError):
        return {}
