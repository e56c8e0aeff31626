"""Translation of a request's body to a Request of the engine: chunks, sampling parameters, origins."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from cacheblend_store import ChunkManifest, ChunkNotFound

from cacheblend_cli.collect.texts import sent_document
from cacheblend_cli.corpus.citations import Citation
from cacheblend_cli.corpus.places import PUT, SENT
from cacheblend_cli.corpus.search import WEAK
from cacheblend_cli.engine.engine import Request
from cacheblend_cli.errors import NothingFound
from cacheblend_cli.prompt.collection import salt_digest
from cacheblend_cli.prompt.records import kept_records
from cacheblend_cli.prompt.wording import CHUNKS, DEFAULT, QUESTION
from cacheblend_cli.server import documents
from cacheblend_cli.server.bodies import AskBody, SearchIn
from cacheblend_cli.server.errors import ApiError, bad
from cacheblend_cli.server.state import ServerState
from cacheblend_cli.server.tenants import Tenant
from cacheblend_cli.settings import Resolved, Settings
from cacheblend_cli.types import PLAIN, AskOptions, AskRequest, SamplingParams, SearchParams, TextDocument

_SAMPLED = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "n", "best_of",
    "ignore_eos", "regex", "stop_repetition",
)  # fmt: skip
_MATCHES, _LEAST_DIGITS = 64, 8  # of ids: with fewer digits, others' chunks could crowd out one's own


@dataclass(frozen=True)
class ParsedRequest:
    """A request, read. system: None where it names none. raw: no chat template. sampling: what it asks for. found: its
    chunks are passages of its messages alone, which say what to do with them: nothing of the default wording is put
    around them."""

    body: AskBody
    tenant: Tenant
    text: str
    sampling: SamplingParams
    history: tuple[str, ...] = ()
    system: str | None = None
    raw: bool = False
    found: bool = False


@dataclass(frozen=True)
class Origin:
    """Document of a chunk: its id on the wire and its title."""

    document: str
    title: str


@dataclass(frozen=True)
class Prepared:
    """A request with its prompt laid out, and where each of its chunks is from, in order."""

    request: Request
    origins: tuple[Origin, ...]


def prepare(host: ServerState, parsed: ParsedRequest) -> Prepared:
    """Resolve a request: its documents cut, its chunks looked up and searched, its prompt laid out. Any thread; nothing
    is stored.

    The prompt has the request's documents first, then the chunks it names, then those that are found. Raises ApiError,
    UsageError, NotFoundError and StoreErrors.
    """
    ask = _ask_request(host, parsed)
    try:
        request = host.engine.resolve(host.store, ask)
    except NothingFound as error:
        what = WEAK if error.message == WEAK else "no stored chunk has a word of the query"
        raise ApiError(404, what, param="search", code="nothing_found") from error
    host.engine.check_fits(request)
    sent: dict[str, Origin] = {}
    for i, document in enumerate(ask.documents):
        sent.setdefault(sent_document(document, ask.tenant).source, Origin(document.id or str(i), document.title or ""))
    origins = [sent[c.planned.source] if c.planned is not None else _origin(c.citation) for c in request.chunks]
    return Prepared(request, tuple(origins))


def _ask_request(host: ServerState, parsed: ParsedRequest) -> AskRequest:
    body, tenant = parsed.body, parsed.tenant
    settings = _blending(host.settings, body)
    retrieves = host.retrieve and not parsed.raw and not body.wants_chunks
    search = None
    if (searched := SearchIn() if retrieves else body.search) is not None:
        params = SearchParams.of(replace(settings, top_k=searched.k or settings.top_k))
        search = replace(params, query=searched.query or "", optional=retrieves)
    return AskRequest.of(
        Resolved(settings, {}),
        parsed.text,
        parsed.sampling,
        keys=_named(host, parsed),
        salt=tenant.salt,
        history=parsed.history,
        documents=tuple(TextDocument(d.text, d.title, d.id) for d in body.documents or ()),
        tenant=tenant.name,
        search=search,
        system=parsed.system,
        prompt=_prompt(host, parsed) if body.wants_chunks or retrieves else PLAIN,
        raw=parsed.raw,
        model_sampling=(),
        options=AskOptions(
            verify=body.verify, priority=body.priority, deadline_s=body.timeout_s, stream=bool(body.stream)
        ),
    )


def _prompt(host: ServerState, parsed: ParsedRequest) -> str | None:
    own = host.engine.template.wording.prompt
    return f"{CHUNKS}\n\n{QUESTION}" if parsed.found and own == DEFAULT else None


def _blending(settings: Settings, body: AskBody) -> Settings:
    given = body.blend.given if body.blend else {}
    if isinstance(given.get("ratio"), str) and given["ratio"] not in ("auto", "model"):
        raise bad("blend.ratio is a number, auto or model", "blend.ratio")
    return replace(settings, **given)


def _named(host: ServerState, parsed: ParsedRequest) -> list[bytes]:
    """Keys of the chunks that the request names. What others' chunks are called makes no difference to it."""
    keys = []
    for name in parsed.body.chunks or ():
        if len(name) < _LEAST_DIGITS and host.keyring.has_tenants:
            raise bad(f"an id is given with {_LEAST_DIGITS} digits or more", "chunks")
        found = []
        with suppress(ChunkNotFound):
            for key in host.store.matching(name, _MATCHES):
                manifest = host.store.undamaged(key)
                if manifest is not None and _is_seen_by(host, manifest, parsed.tenant):
                    found.append(key)
        if not found:
            raise ApiError(404, f"no chunk {name[:64]!r}", param="chunks", code="chunk_not_found")
        if len(found) > 1:
            raise ApiError(404, f"several chunks begin with {name[:64]!r}", param="chunks", code="chunk_ambiguous")
        keys += found
    return keys


def _is_seen_by(host: ServerState, manifest: ChunkManifest, tenant: Tenant) -> bool:
    """Return whether the tenant may read the chunk: where there are tenants, one of its own documents, or of its
    salt."""
    if not host.keyring.has_tenants:
        return True
    if manifest.source.startswith((SENT, PUT)):
        return manifest.source.split("/", 2)[1] == tenant.name
    record = kept_records(host.store).get(manifest.collection)
    return record is not None and record.salt == salt_digest(tenant.salt)


def _origin(cited: Citation) -> Origin:
    return Origin(documents.public_id(cited.name), cited.title or documents.public_title(cited.name))


def sampling_of(base: SamplingParams, body: AskBody, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """Return the request's sampling parameters over the server's defaults. Raises UsageError."""
    given = {
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "stop": body.stops or None,
        "stop_ids": None if body.stop_token_ids is None else tuple(body.stop_token_ids),
        "logit_bias": None if body.logit_bias is None else tuple(body.logit_bias.items()),
        "json_schema": None if body.response_format is None else body.response_format.schema_text,
        **{name: getattr(body, name) for name in _SAMPLED},
    }
    return replace(base, **{name: value for name, value in given.items() if value is not None})
