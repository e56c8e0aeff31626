"""Translate a parsed request body to a Request of the engine: chunks, sampling parameters, origins."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter

from cacheblend_store import ChunkManifest, ChunkNotFound

from cacheblend_cli.cancellation import Cancellation
from cacheblend_cli.collect.texts import sent_document
from cacheblend_cli.corpus.citations import Citation
from cacheblend_cli.corpus.places import PUT, SENT
from cacheblend_cli.corpus.ranking import has_telling_words
from cacheblend_cli.corpus.search import WEAK
from cacheblend_cli.corpus.search_index import has_documents
from cacheblend_cli.engine.engine import Request
from cacheblend_cli.errors import NothingFound
from cacheblend_cli.prompt.collection import salt_digest
from cacheblend_cli.prompt.records import kept_records
from cacheblend_cli.prompt.wording import CHUNKS, DEFAULT, QUESTION
from cacheblend_cli.server.api_errors import ApiError, bad_request
from cacheblend_cli.server.bodies import AskBody, Message, SearchIn
from cacheblend_cli.server.document_names import public_id, public_title
from cacheblend_cli.server.passages import MessagePassage, extract_passages, num_characters
from cacheblend_cli.server.server_state import ServerState
from cacheblend_cli.server.tenants import Tenant
from cacheblend_cli.settings import Resolved, Settings
from cacheblend_cli.types import PLAIN, AskOptions, AskRequest, SamplingParams, SearchParams, TextDocument

_SAMPLED = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "n", "best_of",
    "ignore_eos", "regex", "stop_repetition",
)  # fmt: skip
_LOOKED_AT = 1 << 12  # characters of a question, for a word that is worth a search
_MATCHES, _LEAST_DIGITS = 64, 8  # chunk ids; shorter ones could match too many chunks of other tenants


@dataclass(frozen=True)
class ParsedRequest:
    """A checked request body and the prompt in it."""

    body: AskBody
    tenant: Tenant
    text: str
    sampling: SamplingParams
    history: tuple[str, ...] = ()
    system: str | None = None
    passages: Sequence[MessagePassage] | None = None  # extracted from the messages; None if not looked for
    # all chunks are passages of the messages, which contain their own instructions: omit the default wording
    passages_only: bool = False
    raw: bool = False  # without the chat template
    notes: tuple[str, ...] = ()  # messages for users about the messages

    @property
    def num_characters(self) -> int:
        """Length of all texts that are tokenised or cut."""
        documents = (document.text for document in self.body.given_documents)
        return sum(map(len, (self.text, self.system or "", *self.history, *documents)))


async def parse_chat(
    state: ServerState, body: AskBody, tenant: Tenant, messages: Sequence[Message], sampling: SamplingParams
) -> ParsedRequest:
    """Return the request of a chat's messages. Raises ApiError, PromptTooLong."""
    passages, has_others = None, body.wants_chunks
    if state.find_passages:
        pool = state.pools.for_text(sum(map(num_characters, messages)))
        messages, passages = await state.in_pool(tenant, partial(extract_passages, state, body, messages), pool)
    turns = read_messages(messages)
    return ParsedRequest(
        body,
        tenant,
        turns.question,
        sampling,
        turns.history,
        turns.system,
        passages,
        passages_only=bool(passages) and not has_others,
        notes=(*[_GREETED] * turns.begins_with_assistant, *[_NO_TOOLS] * body.lists_tools),
    )


@dataclass(frozen=True)
class Origin:
    """Document of a chunk: its id on the wire and its title."""

    document: str
    title: str
    in_message: bool = False  # a passage that was extracted from a message
    also_in: tuple[str, ...] = ()  # ids of other documents with the chunk


@dataclass(frozen=True)
class PreparedRequest:
    """A resolved request and the origins of its chunks."""

    request: Request
    origins: tuple[Origin, ...]  # one per chunk of the prompt, in order


async def prepare(state: ServerState, parsed: ParsedRequest) -> PreparedRequest:
    """Resolve a request: cut its documents, look up and search chunks, lay out the prompt. Stores nothing. Chunk order:
    documents of the request, named chunks, search hits. Raises ApiError, UsageError, NotFoundError and StoreErrors."""
    cancellation, pool = Cancellation(), state.pools.for_text(parsed.num_characters)
    return await state.in_pool(parsed.tenant, lambda: _prepare(state, parsed, cancellation), pool, cancellation)


def _prepare(state: ServerState, parsed: ParsedRequest, cancellation: Cancellation) -> PreparedRequest:
    ask = _ask_request(state, parsed)
    try:
        request = state.engine.resolve(state.store, ask, cancellation=cancellation)
    except NothingFound as error:
        what = WEAK if error.message == WEAK else "no stored chunk contains a word of the query"
        raise ApiError(404, what, param="search", code="nothing_found") from error
    request.notes.extend(parsed.notes)
    state.engine.prompts.check_fits(request.plan.num_tokens, request.sampling)
    sent: dict[str, Origin] = {}
    num_given = len(ask.documents) - len(parsed.passages or ())  # passages come after these
    for i, document in enumerate(ask.documents):
        origin = Origin(document.id or str(i), document.title or "", i >= num_given)
        sent.setdefault(sent_document(document, ask.tenant).source, origin)
    origins = [sent[c.planned.source] if c.planned is not None else _origin(c.citation) for c in request.chunks]
    return PreparedRequest(request, tuple(origins))


def _ask_request(state: ServerState, parsed: ParsedRequest) -> AskRequest:
    body, tenant = parsed.body, parsed.tenant
    settings = _with_blend(state.settings, body)
    retrieves = _retrieves(state, parsed)
    search, own = None, state.engine.template.wording.prompt
    prompt: str | None = PLAIN
    if body.wants_chunks or retrieves:
        prompt = f"{CHUNKS}\n\n{QUESTION}" if parsed.passages_only and own == DEFAULT else None
    if (searched := SearchIn() if retrieves else body.wanted_search) is not None:
        params = SearchParams.of(replace(settings, top_k=searched.k or settings.top_k))
        search = replace(params, query=searched.query or "", optional=retrieves)
        if retrieves:  # a question about something else is not answered from the documents
            search = replace(search, on_weak_match="refuse")
    return AskRequest.of(
        Resolved(settings, {}),
        parsed.text,
        parsed.sampling,
        keys=[named_chunk(state, tenant, name, "chunks").key for name in body.chunks or ()],
        salt=tenant.salt,
        history=parsed.history,
        documents=tuple(TextDocument(d.text, d.title, d.id) for d in body.given_documents),
        tenant=tenant.name,
        search=search,
        system=parsed.system,
        prompt=prompt,
        raw=parsed.raw,
        model_sampling=(),
        options=AskOptions(drafts=False, verify=body.verify, priority=body.priority, deadline_s=body.timeout_s),
    )


def _retrieves(state: ServerState, parsed: ParsedRequest) -> bool:
    """Return whether to search for a chat without documents, chunks or search."""
    body = parsed.body
    if not state.settings.retrieve or parsed.raw or body.wants_chunks or body.search is False:
        return False
    if not any(parsed.history[::2]) and not has_telling_words(parsed.text[:_LOOKED_AT]):  # "what can you do?"
        return False
    return has_documents(state.store, state.engine.usable(state.store, parsed.tenant.salt))


def _with_blend(settings: Settings, body: AskBody) -> Settings:
    given = body.blend.given if body.blend else {}
    if isinstance(given.get("ratio"), str) and given["ratio"] not in ("auto", "model"):
        raise bad_request("blend.ratio is a number, auto or model", "blend.ratio")
    return replace(settings, **given)


def named_chunk(state: ServerState, tenant: Tenant, name: str, param: str) -> ChunkManifest:
    """Return a chunk by its id or a prefix of it. Chunks that the tenant may not read are ignored. Raises ApiError.

    param: field of the request that names the chunk.
    """
    if len(name) < _LEAST_DIGITS and state.keyring.has_tenants:
        raise bad_request(f"a chunk id needs at least {_LEAST_DIGITS} digits", param)
    found = []
    with suppress(ChunkNotFound):
        for key in state.store.matching(name, _MATCHES):
            manifest = state.store.undamaged(key)
            if manifest is not None and _may_read(state, manifest, tenant):
                found.append(manifest)
    if not found:
        raise ApiError(404, f"no chunk {name[:64]!r}", param=param, code="chunk_not_found")
    if len(found) > 1:
        raise ApiError(404, f"several chunks begin with {name[:64]!r}", param=param, code="chunk_ambiguous")
    return found[0]


def _may_read(state: ServerState, manifest: ChunkManifest, tenant: Tenant) -> bool:
    """Return whether the tenant may read the chunk: if there are tenants, only chunks of its documents or salt."""
    if not state.keyring.has_tenants:
        return True
    if manifest.source.startswith((SENT, PUT)):
        return manifest.source.split("/", 2)[1] == tenant.name
    record = kept_records(state.store).get(manifest.collection)
    return record is not None and record.salt == salt_digest(tenant.salt)


def _origin(cited: Citation) -> Origin:
    also_in = tuple(map(public_id, cited.others))
    return Origin(public_id(cited.name), cited.title or public_title(cited.name), also_in=also_in)


def sampling_of(base: SamplingParams, body: AskBody, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """Return the server's defaults with the request's sampling parameters. Raises UsageError."""
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


_GREETED = "the conversation begins with the assistant: the prompt has an empty user message before it"
_NO_TOOLS = "the request lists tools: none was called, and the prompt does not contain them"
_AS_TEXT = "this server calls no tools; send calls and results as text in messages of the user and the assistant"
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True)
class ChatTurns:
    """The texts of a chat."""

    system: str | None
    history: tuple[str, ...]  # alternately by user and model, before the question
    question: str
    begins_with_assistant: bool = False  # the history then begins with an empty user message


def read_messages(messages: Sequence[Message]) -> ChatTurns:
    """Join consecutive messages of one role. Raises ApiError for a conversation that cannot be rendered."""
    messages_read: list[tuple[str, str]] = []
    for i, message in enumerate(messages):
        place = f"messages.{i}"
        role = _ROLES.get(message.role)
        if message.role in ("tool", "function"):
            raise bad_request(f"{place} is the result of a tool: {_AS_TEXT}", f"{place}.role")
        if role is None:
            raise bad_request(f"{place}.role is {message.role[:80]!r}; known: {', '.join(_ROLES)}", f"{place}.role")
        if message.calls_tools:
            raise bad_request(f"{place} calls a tool: {_AS_TEXT}", f"{place}.tool_calls")
        if (text := message.text) is None:
            raise bad_request(f"{place}.content is missing", f"{place}.content")
        messages_read.append((role, text))
    turns = [(role, "\n\n".join(text for _, text in run)) for role, run in groupby(messages_read, key=itemgetter(0))]
    system = turns.pop(0)[1] if turns[0][0] == "system" else None
    if any(role == "system" for role, _ in turns):
        raise bad_request("a system message must come first", "messages")
    if not turns or turns[-1][0] != "user":
        raise bad_request("a conversation must end with a user message", "messages")
    if not turns[-1][1].strip():
        raise bad_request("the question is empty", "messages")
    # Many chat templates refuse a conversation that begins with the assistant, and the chunks go into the first user
    # message, at the end of the prefix of all stored KV: it must not depend on a greeting.
    greeted = turns[0][0] == "assistant"
    *history, question = ([""] if greeted else []) + [text for _, text in turns]
    return ChatTurns(system, tuple(history), question, greeted)
