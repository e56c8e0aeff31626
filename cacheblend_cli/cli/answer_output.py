"""Show answers and plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.units import counted, format_latency, format_size
from cacheblend_cli.client import lost
from cacheblend_cli.types import (
    FULL_IS_FASTER,
    NO_RATIO,
    AnswerEvent,
    CompletedAnswer,
    Notes,
    Piece,
    Progress,
    unsupported_line,
)

_MOST_SOURCES = 3
_MODE_NAMES = {"blend": "blended", "reuse": "plain reuse"}
_WAITED_S = 1.0  # a ready engine takes less
_FEW_TOKENS = 16  # do not report the speed of fewer decoded tokens: it includes the start
if TYPE_CHECKING:
    from cacheblend_cli.types import (
        Answer,
        AskOptions,
        AskPlan,
        ChunkUse,
        Timing,
        TokenUse,
        Verification,
    )


class AnswerStream:
    """Shows an answer while it is made: text on stdout, notes and reasoning on stderr."""

    def __init__(self, output: Output, *, draft: bool = False) -> None:
        """draft: the answer may still change, so do not write it to a pipe yet."""
        self._output, self._in_reasoning, self._draft = output, False, draft
        self.begun = False  # something of the answer was shown
        self._line_ended = False
        self._held = draft and not output.out_tty

    def show(self, event: Notes | Progress | Piece) -> None:
        if isinstance(event, Notes):
            for note in event.notes:
                self._output.warn(note)
        elif isinstance(event, Progress):
            self.end_reasoning()
            if event.is_check and self.begun:
                self._end_line()
            self._output.status(progress_line(event))
        elif event.reasoning:
            if text := event.text if self._in_reasoning else event.text.lstrip():
                self._output.aside(text)
                self._in_reasoning = self.begun = True
        else:
            self.end_reasoning()
            if not self._held:
                self.begun = True
                self._output.end_status()
                self._output.text(event.text, end="")

    def end_reasoning(self) -> None:
        if self._in_reasoning:
            self._output.aside("\n")
            self._in_reasoning = False

    def end(self, answer: Answer) -> None:
        """End the answer's line. A text that was held back is written now. Below a draft that a full prefill changed,
        write the corrected text from the word of the first difference."""
        self.end_reasoning()
        if self._held:
            self._output.text(answer.text)
        self._end_line()
        found = answer.confirmation
        if self._draft and not self._held and found is not None and not found.confirmed:
            pairs = zip(answer.text, found.blended_answer, strict=False)
            same = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            self._output.note(f"a full prefill differs from token {found.first_difference} on:")
            self._output.text("... " * bool(same) + answer.text[same.rfind(" ") + 1 :])

    def _end_line(self) -> None:
        if not (self._held or self._line_ended):
            self._output.text("")
            self._line_ended = True


@dataclass(frozen=True)
class AnswerResult:
    answer: Answer
    options: AskOptions  # as requested
    explained: Sequence[str]  # see engine/engine.py: Engine.explain
    tokens: Sequence[Sequence[TokenUse]]  # see engine/engine.py: Engine.explain
    by: str = ""  # the engine that answered, if not in this process
    shown: Sequence[str] = ()  # notes already shown before the answer

    @property
    def record(self) -> dict[str, Any]:
        """The JSON object of --json."""
        record = self.answer.to_dict(ids=self.options.ids, explain=self.options.explain)
        return {**record, "notes": [*self.answer.notes, *self.explained]}

    def with_notes(self, notes: Sequence[str]) -> AnswerResult:
        """Return the answer with notes that the user has seen already: --json has them, too."""
        answer = replace(self.answer, notes=[*self.answer.notes, *notes])
        return replace(self, answer=answer, shown=[*self.shown, *notes])

    @property
    def new_notes(self) -> list[str]:
        return [note for note in self.answer.notes if note not in self.shown]


def result_of(events: Iterable[AnswerEvent], options: AskOptions, streams: AnswerStream | None = None) -> AnswerResult:
    """Wait for an answer, and stream it meanwhile. options: as requested. Raises EngineLost."""
    shown: list[str] = []
    for event in events:
        if isinstance(event, CompletedAnswer):
            by = "" if event.pid is None else f", by the engine of process {event.pid}"
            return AnswerResult(event.answer, options, event.explained, event.tokens, by, shown)
        if streams is not None:
            streams.show(event)
            if isinstance(event, Notes):
                shown = event.notes
    raise lost()


def show_answer(result: AnswerResult, output: Output, extra: dict[str, Any], seconds: float | None) -> None:
    """Show notes, sources and a summary of an answer whose text was shown, or one JSON object with `extra` first.
    seconds: time that the user waited, None in a batch."""
    answer = result.answer
    for note in result.new_notes:
        output.warn(note)
    if output.is_json:
        output.json({**extra, **result.record})
        return
    if result.options.explain:
        from cacheblend_cli.cli.explain_output import show_explanation

        show_explanation(answer, result.tokens, output)
        for line in result.explained:
            output.note(line)
    if cut := cut_note(answer):
        output.note(cut)
    show_summary(result, output, seconds, seconds_to_start(answer.timing))
    if check := answer.confirmation:
        same, other = "confirmed: a full prefill gives the same answer", "changed: the answer is a full prefill's"
        of = f"{check.full_ttft_s * 1000:.0f} of them the full prefill"
        output.note(f"{same if check.confirmed else other}; {check.seconds * 1000:.0f} ms, {of}")
    if answer.verify:
        output.note(f"verify: {verify_line(answer.verify)}; {first_token_line(answer)}")


def progress_line(event: Progress) -> str:
    """Describe a prompt that is being computed."""
    tokens = counted(event.num_tokens, "token")
    text = f"reading {counted(event.num_chunks, 'passage')} ({tokens})" if event.num_chunks else f"reading {tokens}"
    if event.is_check:
        text = f"comparing with a full prefill ({tokens})"
    return f"{text}: {event.num_filled / event.num_tokens:.0%}" if event.num_filled else text


def cut_note(answer: Answer) -> str | None:
    """Return a note if the answer ended at the token limit or was stopped because it repeated itself."""
    if answer.finish_reason == "repetition":
        return "the answer repeated itself and was stopped; cacheblend config set stop_repetition false turns this off"
    if answer.finish_reason != "length":
        return None
    return f"the answer was cut at {counted(len(answer.generated_ids), 'token')}; --max-tokens sets the limit"


def verify_line(found: Verification) -> str:
    """Describe the first difference from a full prefill's greedy answer."""
    if found.first_difference is None:
        return f"a full prefill gives the same {counted(found.answer_tokens, 'token')}"
    if found.first_difference == 0:
        return "a full prefill answers differently from the first token"
    return (
        f"a full prefill gives the same first {counted(found.first_difference, 'token')} "
        f"of {found.answer_tokens}, then another answer"
    )


def first_token_line(answer: Answer) -> str:
    """Return the answer's time to the first token beside a full prefill's, if that was measured or estimated."""
    own, auto = answer.timing.ttft_s, answer.auto
    name = "this answer" if answer.mode == "full" or not answer.cached_tokens else _MODE_NAMES[answer.mode]
    name = "restored" if name == "blended" and answer.ratio_from == NO_RATIO else name
    text = f"first token: {name} {format_latency(own)}"
    if auto:
        text += f" ({format_latency(auto.predicted_ttft_s)} predicted)"
    measured = next((found.full_ttft_s for found in (answer.verify, answer.confirmation) if found), None)
    full = measured or (None if answer.mode == "full" else answer.timing.full_ttft_s)
    if full is None:
        return text if answer.mode == "full" else f"{text}; --verify measures a full prefill's"
    faster = f" ({full / own:.1f} x)" if own else ""
    if measured:
        return f"{text}, full prefill {format_latency(full)}{faster}"
    return f"{text}; a full prefill takes about {format_latency(full)}{faster}"


def show_summary(result: AnswerResult, output: Output, seconds: float | None, start_s: float = 0.0) -> None:
    """Show what is not in the sources, the sources, best first, and a summary line; with --verbose, all sources and
    details. For a weak match, show a warning and the nearest source instead. seconds, start_s: see `summary_line`."""
    if line := unsupported_line(result.answer.claims):
        output.warn(line)
    chunks, weak = by_rank(result.answer.chunks), result.answer.weak_match
    most = len(chunks) if output.verbose else 1 if weak else _MOST_SOURCES
    if weak:
        output.warn("the answer may be made up: its sources match the question weakly")
    for chunk in chunks[:most]:
        place = ", ".join(filter(None, (chunk.source, chunk.place, " / ".join(chunk.headings))))
        also = f"; also in {', '.join(chunk.also_in)}" if chunk.also_in else ""
        output.note(f"{'nearest' if weak else 'source'}: {place}{also}")
    if len(chunks) > most and not weak:
        output.note(f"and {len(chunks) - most} more")
    output.note(summary_line(result.answer, seconds, start_s))
    if result.answer.verify is None:
        output.detail(first_token_line(result.answer))
    output.detail(detail_line(result.answer) + result.by)
    left_out = result.answer.hits_cut, result.answer.hits_repeated
    if any(left_out) and (output.verbose or result.options.explain):
        from cacheblend_cli.corpus.search import left_out_notes

        for note in left_out_notes(*left_out):
            output.note(note)


def by_rank(chunks: Sequence[ChunkUse]) -> list[ChunkUse]:
    """Return searched chunks by rank, then named ones by place in the prompt."""
    return sorted(chunks, key=lambda chunk: (chunk.rank is None, chunk.rank or 0))


def seconds_to_start(timing: Timing) -> float:
    """Return the seconds before the question could be answered: Python and the model were loaded, here or in the engine
    that a command has just left. 0 if the engine was ready."""
    waited = timing.process_s - timing.ttft_s
    return waited if timing.model_load_s or waited >= _WAITED_S else 0.0


def summary_line(answer: Answer, seconds: float | None, start_s: float = 0.0) -> str:
    """Return the time that the user waited, the time to the first token, the share of cached tokens that was
    recomputed, and the number of passages without KV. seconds: time until the end of the answer, None in a batch.
    start_s: part of it before the question could be answered, while Python and the model were loaded."""
    if answer.mode == "full" or not answer.cached_tokens:
        work = f"{counted(answer.prompt_tokens, 'prompt token')}, none cached"
        if answer.mode == "full":
            work = f"full prefill of {counted(answer.prompt_tokens, 'token')}"
    elif answer.ratio_from == NO_RATIO:
        of = counted(answer.prompt_tokens, "prompt token")
        work = f"{answer.exact_tokens:,} of {of} restored, the others computed: the model has recurrent layers"
    else:
        work = f"{answer.recomputed_tokens / answer.cached_tokens:.0%} of {counted(answer.cached_tokens, 'cached token')} recomputed"
    if answer.ratio_from == FULL_IS_FASTER:
        work += ", the faster way here"
    elif answer.auto:
        work += " by --ratio auto"
    computed = sum(chunk.status == "computed" for chunk in answer.chunks)
    if computed and answer.mode != "full":
        work += f"; {computed} of {counted(len(answer.chunks), 'passage')} had no KV yet"
    if answer.prefix_cache_tokens:
        work += f"; {counted(answer.prefix_cache_tokens, 'token')} were still in memory from an earlier prompt"
    if seconds is None:
        return work
    start = f": {start_s:.1f} s to start, then" if start_s else ","
    return f"{seconds:.1f} s{start} first token after {format_latency(answer.timing.ttft_s)}; {work}"


def detail_line(answer: Answer) -> str:
    """Return token counts and decoding speed."""
    tokens = counted(answer.prompt_tokens, "prompt token")
    inexact = answer.cached_tokens - answer.exact_tokens
    if answer.mode == "full" or not answer.cached_tokens:
        parts = [tokens]
    elif not inexact:
        parts = [f"{tokens}, {answer.cached_tokens:,} of them cached, all exact here"]
    else:
        parts = [
            f"{tokens}, {answer.cached_tokens:,} of them cached: {answer.exact_tokens:,} exact here, {answer.recomputed_tokens:,} of "
            f"the other {inexact:,} recomputed"
        ]
    t = answer.timing
    if answer.auto and answer.ratio_from != FULL_IS_FASTER:
        parts.append(f"--ratio auto chose {answer.auto.decision.mode} {answer.ratio:.2g}")
    if t.model_load_s:
        parts.append(f"model loaded in {t.model_load_s:.1f} s")
    if t.decode_tokens_per_s and len(answer.generated_ids) >= _FEW_TOKENS:
        parts.append(f"{t.decode_tokens_per_s:.0f} tokens/s")
        if answer.accepted_tokens:
            parts.append(f"{answer.tokens_per_step:.1f} tokens a step ({answer.accepted_tokens} accepted)")
    return ", ".join(parts)


def show_plan(plan: AskPlan, output: Output, extra: dict[str, Any]) -> None:
    for note in plan.notes:
        output.warn(note)
    output.json({**extra, **plan.to_dict()})
    if plan.chunks:
        rows = [(c.id[:12], c.tokens, c.status, c.source) for c in plan.chunks]
        output.table(("chunk", "tokens", "status", "source"), rows, right=(1,), ends=(3,))
    before = plan.prompt_tokens - plan.cached_tokens - plan.fresh_tokens
    output.text(
        f"{plan.prompt_tokens} prompt tokens: {plan.cached_tokens} cached ({plan.exact_tokens} exact), "
        + (f"{before} before them cached too, " if before else "")
        + f"{plan.fresh_tokens} fresh; {format_size(plan.kv_bytes)} of KV to load"
    )
    if plan.auto:
        a = plan.auto
        output.text(
            f"--ratio auto: {a.decision.mode} at ratio {a.decision.ratio:.2g}, first token after "
            f"{a.predicted_ttft_s * 1000:.0f} ms, {a.predicted_full_ttft_s * 1000:.0f} ms by a full prefill"
        )
