"""An engine in this process, for one question after the other or for many side by side."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from typing import TYPE_CHECKING, Any

from cacheblend_cli.cli import options
from cacheblend_cli.cli.answers import Explained, Streams, Told
from cacheblend_cli.cli.output import Output
from cacheblend_cli.inquiry import Inquiry, Manner
from cacheblend_cli.settings import Resolved

if TYPE_CHECKING:
    from cacheblend_store import ChunkStore

    from cacheblend_cli.api import Answer, AskPlan
    from cacheblend_cli.runtime.jobs import Job
    from cacheblend_cli.runtime.service import Service


class LocalEngine:
    def __init__(self, resolved: Resolved, manner: Manner, output: Output, store: ChunkStore) -> None:
        """Load it. What is wrong with the settings is said before. Raises UsageError, NotFoundError, DeviceError."""
        options.import_engine()
        from cacheblend_cli.runtime.config import BlendConfig
        from cacheblend_cli.runtime.model_sampling import sampling_of

        BlendConfig.of(resolved.settings)
        sampling_of(resolved, **manner.sampled)
        self._store, self._engine = store, options.load_engine(resolved.settings, output)
        self._service: Service | None = None
        self._say = cache(output.note)  # once, of however many questions

    def ask(self, inquiry: Inquiry, streams: Streams | None) -> Told:
        job = self._engine.job(self._store, inquiry, self._say)
        answer = self._engine.ask(
            self._store,
            job.question,
            on_text=streams.text if streams else None,
            on_reasoning=streams.reasoning if streams else None,
            verify=job.verify,
            confirm=job.confirm,
            save_holes=job.save_holes,
            auto=job.auto,
        )
        return self._told(inquiry, job, answer)

    def plan(self, inquiry: Inquiry) -> AskPlan:
        job = self._engine.job(self._store, inquiry, self._say)
        return self._engine.plan(self._store, job.question, auto=job.auto)

    def serve(self, concurrency: int) -> None:
        """Begin to answer so many questions side by side.

        What an answer is does not depend on those beside it: no KV that was blended for one question serves another.
        """
        from cacheblend_cli.runtime.service import Limits, Service

        limits = Limits(max_waiting=2 * concurrency + 1, max_sequences=concurrency, hot_blended=False)
        self._service = Service(self._engine.runtime, self._store, limits)

    def begin(self, inquiry: Inquiry) -> Callable[[Streams | None], Told]:
        """Have it asked beside others; what is given waits for its answer."""
        from cacheblend_cli.runtime.service import Done, Failed

        assert self._service is not None
        job = self._service.run(lambda runtime: self._engine.job(self._store, inquiry, self._say)).result()
        answered: Future[Any] = Future()

        def heard(event: object) -> None:
            if isinstance(event, Done):
                answered.set_result(event.answers[0])
            elif isinstance(event, Failed):
                answered.set_exception(event.error)

        self._service.submit(job, heard)
        return lambda streams: self._told(inquiry, job, answered.result())

    def close(self) -> None:
        if self._service is not None:
            self._service.close()

    def _told(self, inquiry: Inquiry, job: Job, answer: Answer) -> Told:
        return Told(answer, Explained(*self._engine.told(self._store, job.question, answer, inquiry.manner)))
