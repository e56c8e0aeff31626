"""Events of answers that vLLM decodes: prefilled here, KV handed over, tokens streamed back."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from cacheblend_cli.engine.engine import Engine, Request, drawn_outside
from cacheblend_cli.engine.events import Done, Early, Event, HandedOver
from cacheblend_cli.errors import DeviceError
from cacheblend_cli.server.request_events import RequestEvents, check_answered
from cacheblend_cli.server.server_state import ServerState
from cacheblend_cli.types import Answer, SamplingParams
from cacheblend_vllm.client import Client, Unreachable
from cacheblend_vllm.files import HandOverFile


class RemoteEvents(RequestEvents):
    """Events of a request decoded by a vLLM server. If it gives no first token, the answer is decoded here, with a
    note."""

    def __init__(self, state: ServerState, request: Request, client: Client, file: HandOverFile) -> None:
        """Raises QueueFull, UsageError."""
        self._client, self._request, self._file = client, request, file
        self._local: RequestEvents | None = None
        self._reader: asyncio.Task[None] | None = None
        super().__init__(state, request.handed_to(self._file))

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self._reader is not None:
            self._reader.cancel()
        if self._local is not None:
            self._local.__exit__(*error)
        self._file.remove()

    async def events(self) -> AsyncIterator[Event]:
        prefilled = super().events()
        try:
            handed = await anext(prefilled)
            assert isinstance(handed, HandedOver), "a prompt must be handed over before it ends"
            async for event in self._decoded(handed.report, prefilled):
                yield event
        except (Unreachable, DeviceError) as error:
            why = error.message if isinstance(error, DeviceError) else str(error)
            self._request.notes.append(f"decoded here, not by the server of --decoder: {why}")
            options = replace(self._request.options, save=isinstance(error, DeviceError))
            self._local = RequestEvents(self._state, replace(self._request, options=options))
            async for event in self._local.events():
                yield event

    async def _decoded(self, report: Answer, prefilled: AsyncIterator[Event]) -> AsyncIterator[Event]:
        """Yield the events of the remote answer. prefilled: events of the prompt after its hand-over."""
        engine, sampling, handed_at = self._state.engine, self._request.sampling, time.perf_counter()
        pieces = list[Event]()
        limits = SamplingParams(
            max_tokens=sampling.max_tokens,
            stop=sampling.stop,
            stop_ids=sampling.stop_ids,
            ignore_eos=sampling.ignore_eos,
            stop_repetition=sampling.stop_repetition,
        )
        output = engine.outside_answer(limits, report.prompt_ids, pieces.append)
        body = {
            "prompt": report.prompt_ids,
            **sampling_fields(engine, sampling),
            "cache_salt": salt_of(self._request),
            "kv_transfer_params": self._file.params,
        }
        ended = False
        early: Early | None = None
        arrived = asyncio.Queue[list[int] | Exception | None]()
        self._reader = asyncio.create_task(self._read(body, arrived))
        try:
            while not ended:
                arrival = self._state.unless_ended(asyncio.ensure_future(arrived.get()))
                step = await asyncio.wait_for(arrival, self._left_s())
                if isinstance(step, Exception):
                    raise step
                if step is None:
                    output.out.finish_reason = "stop" if len(output.out.token_ids) < output.max_tokens else "length"
                    break
                if not output.out.token_ids:
                    self._state.metrics.first_token(time.perf_counter() - self._submitted)
                for token_id in step:
                    if ended := not output.append(drawn_outside(token_id)):
                        break
                while pieces:
                    yield pieces.pop(0)
        except TimeoutError:
            early = "deadline"
        finally:
            self._reader.cancel()
        if not output.out.token_ids:
            if early is None:
                raise Unreachable("the answer has no token")
            check_answered(Done([], early))
        generation = output.end()
        for piece in pieces:
            yield piece
        async for _ in prefilled:
            pass  # missing chunks are stored meanwhile
        timing = replace(
            report.timing,
            ttft_s=report.timing.ttft_s + max(0.0, generation.first_token_at - handed_at),
            decode_tokens_per_s=generation.tokens_per_s,
        )
        answer = replace(
            report,
            text=generation.text,
            reasoning=generation.reasoning,
            reasoning_tokens=generation.reasoning_tokens,
            finish_reason=early or generation.finish_reason,
            generated_ids=generation.token_ids,
            timing=timing,
        )
        yield Done([answer], early)

    async def _read(self, body: dict[str, Any], arrived: asyncio.Queue[list[int] | Exception | None]) -> None:
        """Queue the completion's token ids, then None or the error. Cancelling this cancels vLLM's request."""
        try:
            async for ids in self._client.token_ids(body):
                arrived.put_nowait(ids)
            arrived.put_nowait(None)
        except Exception as error:
            arrived.put_nowait(error)

    def _left_s(self) -> float | None:
        limit_s = self._request.options.deadline_s
        return None if limit_s is None else max(0.0, limit_s - (time.perf_counter() - self._submitted))


def can_decode_remotely(engine: Engine, request: Request) -> bool:
    """Return whether vLLM can decode the request: no check against a full prefill, grammar, log-probabilities, n > 1 or
    reasoning budget."""
    sampling = request.sampling
    return (
        not (request.options.verify or request.options.confirm)
        and not sampling.has_form
        and sampling.logprobs is None
        and sampling.prompt_logprobs is None
        and max(sampling.n, sampling.best_of) == 1
        and engine.prompts.reasoning_budget(sampling) is None
    )


def sampling_fields(engine: Engine, sampling: SamplingParams) -> dict[str, Any]:
    """Return the sampling parameters as vLLM's fields. Stop strings are matched here."""
    ends = set(sampling.stop_ids) | (set() if sampling.ignore_eos else set(engine.model.eos_ids))
    names = (
        "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "ignore_eos",
    )  # fmt: skip
    return {
        **{name: getattr(sampling, name) for name in names},
        "max_tokens": engine.prompts.max_new_tokens(sampling),
        "stop_token_ids": sorted(ends),
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias} or None,
    }


def salt_of(request: Request) -> str:
    """Return vLLM's cache_salt: vLLM shares KV blocks only between prompts with the same salt.

    Exact KV is shared within the tenant. Repaired KV depends on policy, chunks and question: only within one prompt.
    """
    parts: list[object] = [request.collection.id, request.collection.salt]
    if request.plan.inexact_tokens:
        chunks = [(s.key, s.status, s.codec) for s in request.plan.chunks]
        parts += [request.blend, chunks, request.suffix_ids]
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
