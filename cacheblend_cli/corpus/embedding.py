"""Embedding models for search by meaning. Static models are the default: a text's vector is the mean of its token
vectors."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_cli.errors import NotFoundError, UsageError
from cacheblend_cli.extras import install_hint

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from tokenizers import Tokenizer

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
        import xxhash

        if own := getattr(self._model, "digest", None):
            return str(own)
        return xxhash.xxh3_128_hexdigest(self._model.embedding.tobytes())


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
    from cacheblend_cli.corpus.sentences import SentenceModel, is_sentence_model

    folder = Path(name).expanduser()
    hint = "name a directory saved by model2vec or sentence-transformers, or a model2vec Hugging Face id"
    if is_sentence_model(folder):
        try:
            return Embedder(name, SentenceModel(folder))
        except (OSError, ValueError) as error:  # missing or damaged files
            raise NotFoundError(f"{name} does not hold a sentence-transformers model: {error}", hint) from error
    if find_spec("model2vec") is None:
        raise UsageError(f"--embeddings {name} needs model2vec, which is not installed", install_hint("meaning"))
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
