"""What the CLI calls and what Python users import: load an engine, precompute documents, ask questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cacheblend_store import ChunkStore

from cacheblend_cli.corpus.search import Lookup
from cacheblend_cli.engine.config import BlendConfig, EngineConfig
from cacheblend_cli.engine.core import answer_one
from cacheblend_cli.engine.jobs import Event, Job, Reasoning, Text, Token
from cacheblend_cli.engine.plan import AskPlan, plan
from cacheblend_cli.engine.request import Question, chunk_of, resolve
from cacheblend_cli.engine.runtime import Runtime, Say
from cacheblend_cli.engine.sampling import as_the_model, sampling_of
from cacheblend_cli.engine.search import with_chunks
from cacheblend_cli.engine.sequence_output import NOBODY, Listener
from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.generic import GENERIC_PATH
from cacheblend_cli.model.loading import LoadedModel
from cacheblend_cli.model.text_stream import token_texts
from cacheblend_cli.types import Answer, AskOptions, AskRequest, ChunkUse, SamplingParams, TokenUse

if TYPE_CHECKING:
    from cacheblend_cli.collect.paths import Paths
    from cacheblend_cli.collect.precompute import Difference, PrecomputeEvent, PrecomputeOptions, PrecomputeReport
    from cacheblend_cli.collect.recheck import RecheckReport

__all__ = [
    "Answer", "AskOptions", "AskPlan", "BlendConfig", "Difference", "Engine", "EngineConfig", "Listener", "Lookup", "Paths", "PrecomputeEvent",
    "PrecomputeOptions", "PrecomputeReport", "Question", "RecheckReport", "SamplingParams", "TokenUse",
]  # fmt: skip
_OF_DOCUMENTS = {
    "Paths": "paths", "RecheckReport": "recheck",
    **dict.fromkeys(("Difference", "PrecomputeEvent", "PrecomputeOptions", "PrecomputeReport"), "precompute"),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """What is about storing documents, imported when it is asked for: questions do without converters and surveys."""
    if name in _OF_DOCUMENTS:
        return getattr(import_module(f"cacheblend_cli.collect.{_OF_DOCUMENTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Engine:
    """A loaded model and its prompt template. Not thread-safe; use one a thread."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    @classmethod
    def load(cls, config: EngineConfig, progress: Say | None = None, notice: Say | None = None) -> Engine:
        """Load the model. progress: told what takes time; notice: told what takes time once on a machine. Raises
        NotFoundError, UsageError or DeviceError."""
        return cls(Runtime.load(config, progress, notice))

    @property
    def model(self) -> LoadedModel:
        return self.runtime.model

    @property
    def config(self) -> EngineConfig:
        return self.runtime.config

    def precompute(
        self,
        store: ChunkStore | None,
        paths: Sequence[str] | Paths,
        options: PrecomputeOptions,
        on_event: Callable[[PrecomputeEvent], None],
        confirm: Callable[[Difference], bool] | None = None,
    ) -> PrecomputeReport:
        """Bring the store up to date with the documents under `paths`. store None: a dry run.

        What `options` leaves open is as the store remembers it of the paths. confirm: asked before documents are computed
        again because they are stored with other settings. Raises NotFoundError, UsageError, StoreErrors, DeviceError.
        """
        from cacheblend_cli.collect.paths import Paths
        from cacheblend_cli.collect.precompute import precompute

        if options.kv_dtype in (None, "auto") and self.config.kv_dtype != "auto":
            options = replace(options, kv_dtype=self.config.kv_dtype)
        if options.day is not None and self.runtime.template.day is None:
            raise UsageError(f"the chat template of {self.model.name} prints no date", "leave --date out")
        day = options.day or self.runtime.day(store, options.salt)
        paths = paths if isinstance(paths, Paths) else Paths(paths)
        return precompute(self.runtime.collection(options.salt, day=day), store, paths, options, on_event, confirm)

    def roots(self, store: ChunkStore, salt: str = "") -> list[str]:
        """The paths that the store remembers for this model and salt, as real ones."""
        from cacheblend_cli.collect.source_settings import SourceSettings

        return SourceSettings(self.runtime.collection(salt), store).paths

    def recheck(
        self,
        store: ChunkStore,
        count: int,
        *,
        repair: bool = False,
        salt: str = "",
        progress: Callable[[int, int], None] | None = None,
    ) -> RecheckReport:
        """Compute `count` random chunks of this model again and compare them with the store."""
        from cacheblend_cli.collect.recheck import recheck

        day = self.runtime.day(store, salt)
        return recheck(self.runtime.collection(salt, day=day), store, count, repair=repair, progress=progress)

    def ask(
        self,
        store: ChunkStore | None,
        question: Question,
        wanted: AskOptions | Job = AskOptions(),
        listener: Listener = NOBODY,
    ) -> Answer:
        """Answer a question over its chunks, in the caller's thread. Blending never changes stored KV.

        Missing chunks (without usable KV) are computed, and collected and stored afterwards, when the store is open for
        writing. What was used is noted for the store's eviction (`ChunkStore.touch`). Raises NotFoundError for an unknown
        chunk, UsageError for an empty question.
        """
        self.runtime.memory()  # taken once: no part of an answer
        job = wanted
        if isinstance(job, AskOptions):
            job = Job(question, verify=job.verify, confirm=job.confirm, save_holes=job.save)

        def on_event(event: Event) -> None:
            if isinstance(event, Text | Reasoning):
                call = listener.text if isinstance(event, Text) else listener.reasoning
                if call and event.index == 0:
                    call(event.text)
            elif isinstance(event, Token) and listener.token and event.index == 0:
                listener.token(event.logprob)

        return answer_one(self.runtime, store, job, on_event)[0]

    def plan(self, store: ChunkStore | None, question: Question, *, auto: bool = False) -> AskPlan:
        """What `ask` would do, without doing it. Raises as it does for what it would refuse."""
        return plan(self.runtime, resolve(self.runtime, store, question), auto=auto)

    def search(self, store: ChunkStore, question: Question, lookup: Lookup | None = None) -> Question:
        """The question with the stored chunks that suit it best, in the order they are best read.

        Raises NotFoundError, which says why, when there are none.
        """
        return with_chunks(self.runtime, store, question, lookup or Lookup())

    def job(self, store: ChunkStore, ask_request: AskRequest, say: Say | None = None) -> Job:
        """What the ask_request asks, its chunks searched where it names none. say: told where it cannot be searched as is wanted.

        Raises UsageError, NotFoundError, StoreErrors.
        """
        settings, ask_options = ask_request.resolved.settings, ask_request.options
        sampling = as_the_model(
            sampling_of(ask_request.resolved, **ask_options.sampled), ask_request.resolved, self.runtime.model
        )
        blend, keys = BlendConfig.of(settings), [bytes.fromhex(key) for key in ask_request.keys or ()]
        question = Question(ask_request.question, keys, blend, sampling, settings.salt, history=ask_request.history)
        question = question.dated(self.runtime, store)
        if ask_request.keys is None:
            lookup = Lookup.of(settings, ask_request.scope, say)
            question = with_chunks(self.runtime, store, question, lookup)
        auto = settings.ratio == "auto"
        return Job(
            question, verify=ask_options.verify, confirm=ask_options.confirm, auto=auto, save_holes=ask_options.save
        )

    def told(
        self, store: ChunkStore, question: Question, answer: Answer, ask_options: AskOptions
    ) -> tuple[list[str], list[list[TokenUse]]]:
        """What --explain adds: what there is to say of the model, and where the prompt's ids say other text than the template
        renders with the chunks in it. And the tokens of each chunk, whose texts together are the chunk's, where they are wanted."""
        said = [GENERIC_PATH] if ask_options.explain and self.model.spec.generic else []
        if ask_options.explain:
            texts = [manifest.text for key in question.keys if (manifest := chunk_of(store, key))]
            template = self.runtime.template_of(question.wording, question.dated(self.runtime, store).day)
            said += template.differences(texts, question.text, answer.prompt_ids)
        return said, [self._token_uses(answer, chunk) for chunk in answer.chunks] if ask_options.tokens else []

    def _token_uses(self, answer: Answer, chunk: ChunkUse) -> list[TokenUse]:
        texts = token_texts(self.model.tokenizer, answer.prompt_ids[chunk.start : chunk.start + chunk.tokens])
        return [TokenUse(text, kind) for text, kind in zip(texts, answer.kinds(chunk), strict=True)]
