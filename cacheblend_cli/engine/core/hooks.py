"""Hooks: the core's interface to features, none of which it names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from cacheblend_cli.blend.prefill import PrefillResult
from cacheblend_cli.engine.core.report import PrefillReport
from cacheblend_cli.engine.core.sequence_output import SequenceOutput
from cacheblend_cli.engine.events import OnEvent
from cacheblend_cli.engine.request.request import Request
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.types import Answer

if TYPE_CHECKING:
    from cacheblend_cli.kv.export import KVReader


class Hook:
    """Work of a feature for one request. Each method does nothing by default; an error ends only this request.

    outputs_from: first position of the prompt whose logits it takes. is_alone: the prompt shares no launch, because it
    is timed or observed. holds_back: the text is emitted once it is complete, unless `on_answer` raises.
    """

    outputs_from: int | None = None
    is_alone = holds_back = False

    def on_begin(self) -> None:
        """Called when the prompt begins to be computed, possibly again."""

    def on_prompt_logits(self, logits: Tensor) -> None:
        """Take the logits of the prompt's rows from `outputs_from` on, fp32 [n, vocab_size], in order."""

    def on_slice(self, result: PrefillResult) -> None:
        """Called after each step of the prompt's prefill."""

    def on_prefill(self, report: PrefillReport, export: Callable[[], KVReader]) -> Begun | None:
        """Called when the prompt is computed. Return an answer that this hook has begun, or None to let the engine draw
        one. export: returns a reader of the prompt's KV."""
        return None

    def on_logits(self, index: int) -> Callable[[Tensor], None] | None:
        """Return a callback for the logits, fp32 [vocab_size], that each token of answer `index` is drawn from."""
        return None

    def watches(self, index: int, num_tokens: int) -> bool:
        """Return whether `on_attention` takes the attention of the token after num_tokens tokens of answer `index`."""
        return False

    def on_attention(self, index: int, weights: Tensor) -> None:
        """Take the attention of the newest token of answer `index`, [kv_len] fp32."""

    def review(self, texts: Sequence[str], is_cancelled: Callable[[], bool]) -> Callable[[], None] | None:
        """Called when the texts of the answers are known: before `on_complete`, and before they are reported. Return
        work for another thread, for which this request waits and others do not. is_cancelled: returns whether nobody
        waits for the answers any more."""
        return None

    def on_complete(self, outputs: Sequence[SequenceOutput]) -> Further | None:
        """Called when the answers are complete. Return a further request to run before they are reported."""
        return None

    def on_answer(self, report: PrefillReport, index: int, answer: Answer) -> None:
        """Fill in the report of answer `index`, which may be a partial one."""

    def on_done(self, report: PrefillReport, answers: Sequence[Answer], emit: OnEvent) -> Iterator[None] | None:
        """Called when the complete answers are reported. Return work to do before the request ends, at most one launch
        between two values. emit: callback for further events."""
        return None


@dataclass(frozen=True)
class Begun:
    """An answer that a hook has begun. is_complete: nothing is left to decode."""

    output: SequenceOutput | None
    is_complete: bool


@dataclass(frozen=True)
class Further:
    """A request that is run for another one and reports as its parent. hook: takes its results."""

    request: Request  # its prompt may end with tokens of an answer
    hook: Hook
    num_answer_tokens: int  # number of these
    max_new_tokens: int


Feature = Callable[[Runtime, Request], tuple[Request, Hook | None]]
"""Admits a request: returns it as it is to be run, and the hook that follows it. Raises UsageError."""
