"""Embeddings, static ones first of all: a text's vector is the mean of its tokens' vectors. What search by meaning compares."""

from __future__ import annotations

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
_MOST_TOKENS = 2048  # of a text; a chunk is shorter


class TokenMeans:
    """What model2vec's StaticModel computes, for weights that are ready as they are stored: importing that takes longer than
    these take to read. embedding: [num_tokens, dim]."""

    def __init__(self, embedding: NDArray[Any], tokenizer: Tokenizer) -> None:
        self.embedding, self._tokenizer = embedding, tokenizer
        self._unknown = tokenizer.token_to_id("<unk>")

    def encode(self, texts: Sequence[str], max_length: int) -> NDArray[np.float32]:
        """[num_texts, dim] fp32; of a text without a known token, zeros. max_length: tokens of each that are read."""
        import numpy as np

        means = np.zeros((len(texts), self.embedding.shape[1]), np.float32)
        for mean, encoding in zip(means, self._tokenizer.encode_batch(texts, add_special_tokens=False), strict=True):
            if ids := [i for i in encoding.ids[:max_length] if i != self._unknown]:
                mean[:] = self.embedding[ids].mean(axis=0, dtype=np.float32)
        return means


class Embedder:
    """A model of embeddings. name: what it was loaded from."""

    def __init__(self, name: str, model: Any) -> None:
        self.name, self._model = name, model

    def embed(self, texts: Sequence[str], *, question: bool = False) -> NDArray[np.float32]:
        """Vectors of length 1, [num_texts, dim] fp32; of a text without a known token, zeros. question: they ask, and do not
        answer, which some models are told."""
        import numpy as np

        before = getattr(self._model, "prompts", {}).get("query" if question else "document", "")
        vectors = np.asarray(self._model.encode([before + t for t in texts], max_length=_MOST_TOKENS), dtype=np.float32)
        norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
        return np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0)

    @cached_property
    def digest(self) -> str:
        """Of the weights: vectors of other weights are not comparable."""
        import xxhash

        if own := getattr(self._model, "digest", None):
            return str(own)
        return xxhash.xxh3_128_hexdigest(self._model.embedding.tobytes())


def find_embedder(name: str = "") -> Embedder | None:
    """The embeddings of this name: a model2vec directory or hub id, or a sentence-transformers directory. Without a name the small English ones that come with
    the package wordllama, None where that is not installed.

    Raises NotFoundError where a name leads to no weights, UsageError where it needs model2vec and that is not installed.
    """
    if not name:
        spec = find_spec("wordllama")
        return None if spec is None else _bundled(next(iter(spec.submodule_search_locations or ()), ""))
    return _named(name)


@lru_cache(maxsize=2)
def _named(name: str) -> Embedder:
    from cacheblend_cli.corpus.sentences import SentenceModel, is_sentence_model

    folder = Path(name).expanduser()
    if is_sentence_model(folder):
        try:
            return Embedder(name, SentenceModel(folder))
        except (OSError, ValueError) as error:  # of files that are missing or damaged
            raise NotFoundError(
                f"{name} holds no sentence-transformers model: {error}",
                "name a directory saved by model2vec or sentence-transformers, or a model2vec Hugging Face id",
            ) from error
    if find_spec("model2vec") is None:
        raise UsageError(f"--embeddings {name} needs model2vec, which is not installed", install_hint("meaning"))
    from model2vec import StaticModel

    local = folder.is_dir()
    try:
        return Embedder(name, StaticModel.from_pretrained(str(folder) if local else name))
    except Exception as error:  # the hub's errors and those of its network, the loader's and those of its formats
        what = "holds no model2vec model" if local else "is no directory here, and the hub does not give it"
        raise NotFoundError(
            f"{name} {what}: {error}",
            "name a directory saved by model2vec or sentence-transformers, or a model2vec Hugging Face id",
        ) from error


@lru_cache(maxsize=1)
def _bundled(folder: str) -> Embedder | None:
    weights, tokenizer = (Path(folder) / part for part in _WORDLLAMA)
    if not (weights.is_file() and tokenizer.is_file()):
        return None
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    [vectors] = load_file(weights).values()
    return Embedder("wordllama", TokenMeans(vectors, Tokenizer.from_file(str(tokenizer))))
