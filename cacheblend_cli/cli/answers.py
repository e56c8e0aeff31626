"""Show answers and plans."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile, zip_longest
from typing import TYPE_CHECKING, Any

from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.sizes import format_size
from cacheblend_cli.clock import since_process_start
from cacheblend_cli.errors import ExitCode

_MOST_SOURCES = 3
_FEW_TOKENS = 16  # decoded tokens, below which their speed says little: an answer's start is in it
_SHOWN = 600  # characters of a chunk
_MARKS = {
    "exact": ("36", ("", "")),
    "reused": ("2", ("", "")),
    "recomputed": ("1;4;33", ("[", "]")),
    "computed": ("1;35", ("{", "}")),
}
"""Origin of a token's KV -> SGR style, and brackets for output without colours."""

if TYPE_CHECKING:
    from cacheblend_cli.blend.cost import AutoReport
    from cacheblend_cli.types import Answer, AskOptions, AskPlan, ChunkUse, Confirmation, Risk, TokenUse, Verification


class Streams:
    """Streaming callbacks: text goes to stdout, notes and reasoning before it to stderr. draft: the answer may still
    change, so hold it back from a pipe. begun: whether anything of the answer was shown. first_at: perf_counter of its
    first piece."""

    def __init__(self, output: Output, *, draft: bool = False) -> None:
        self._output, self._in_reasoning = output, False
        self.begun = False
        self.first_at: float | None = None
        self._held = draft and not output.out_tty

    def notes(self, notes: Sequence[str]) -> None:
        """Show what is known about the sources before there is an answer."""
        for note in notes:
            self._output.warn(note)

    def reasoning(self, piece: str) -> None:
        self.first_at = self.first_at or time.perf_counter()
        piece = piece if self._in_reasoning else piece.lstrip()
        if piece:
            self._output.aside(piece)
            self._in_reasoning = self.begun = True

    def text(self, piece: str) -> None:
        self.first_at = self.first_at or time.perf_counter()
        self.end_reasoning()
        if not self._held:
            self.begun = True
            self._output.text(piece, end="")

    def end_reasoning(self) -> None:
        if self._in_reasoning:
            self._output.aside("\n")
            self._in_reasoning = False


@dataclass(frozen=True)
class Result:
    """An answer to show. options: of its request. explained, tokens: see engine/engine.py: Engine.explain. by: the
    engine that answered, if it is not in this process. shown: notes that were shown before the answer."""

    answer: Answer
    options: AskOptions
    explained: Sequence[str]
    tokens: Sequence[Sequence[TokenUse]]
    by: str = ""
    shown: Sequence[str] = ()

    @property
    def record(self) -> dict[str, Any]:
        """The object of --json."""
        record = self.answer.to_dict(ids=self.options.ids, explain=self.options.explain)
        return {**record, "notes": [*self.answer.notes, *self.explained]}

    @property
    def new_notes(self) -> list[str]:
        return [note for note in self.answer.notes if note not in self.shown]


End = Callable[[Streams | None], Result]
"""Wait for an answer while its pieces are streamed."""


def show_answer(
    result: Result, output: Output, *, json: bool, extra: dict[str, Any], seconds: float | None = None
) -> None:
    """Show notes, sources and a summary of an answer whose text was streamed, or all of it as one JSON object after
    `extra`. seconds: how long the user waited for the answer, None among answers of a batch."""
    answer = result.answer
    if not json:
        _end_text(answer, output)
    for note in result.new_notes:
        output.warn(note)
    if json:
        output.json({**extra, **result.record})
        return
    if result.options.explain:
        _explain(answer, output)
        _show_tokens(answer, result.tokens, output)
        for line in result.explained:
            output.note(line)
    if cut := cut_note(answer):
        output.note(cut)
    show_summary(result, output, seconds)
    if answer.risk:
        output.note(_risk_line(answer.risk))
    if answer.confirmation:
        output.note(_confirmation_line(answer.confirmation))
    if answer.verify:
        output.note(verify_line(answer.verify))


def cut_note(answer: Answer) -> str | None:
    """Say that an answer ended at the token limit, or was stopped because it repeated itself."""
    if answer.finish_reason == "repetition":
        return "the answer repeated itself and was stopped; --no-stop-repetition lets it go on"
    if answer.finish_reason != "length":
        return None
    return f"the answer was cut at {counted(len(answer.generated_ids), 'token')}; --max-tokens sets the limit"


def verify_line(found: Verification) -> str:
    """Say where the greedy answers of a full prefill and of the blended KV part, and what the full prefill cost."""
    if found.first_difference is None:
        same = f"a full prefill gives the same {counted(found.answer_tokens, 'token')}"
    elif found.first_difference == 0:
        same = "a full prefill answers differently from the first token"
    else:
        same = (
            f"a full prefill gives the same first {counted(found.first_difference, 'token')} "
            f"of {found.answer_tokens}, then another answer"
        )
    return f"verify: {same}; first token after {found.full_ttft_s * 1000:.0f} ms"


def counted(count: int, noun: str) -> str:
    """Return "1 token", "2 tokens"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def changed(answer: Answer) -> ExitCode:
    """Return the exit code for an answer: CHANGED if --confirm changed it."""
    return ExitCode.CHANGED if answer.confirmation and not answer.confirmation.confirmed else ExitCode.OK


def _end_text(answer: Answer, output: Output) -> None:
    """End the answer's line. With --confirm a pipe gets the confirmed answer; a terminal, which has the draft, gets the
    corrected text from the word of the first difference."""
    found = answer.confirmation
    if found is None or (output.out_tty and found.confirmed):
        output.text("")
    elif not output.out_tty:
        output.text(answer.text)
    else:
        pairs = zip(answer.text, found.blended_answer, strict=False)
        same = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        output.text("")
        output.note(f"a full prefill differs from token {found.first_difference} on:")
        output.text("... " * bool(same) + answer.text[same.rfind(" ") + 1 :])


def _risk_line(found: Risk) -> str:
    if found.full_prefill_at is None:
        return f"estimated risk that a full prefill answers differently: {found.estimate:.1%} (limit {found.limit:.1%})"
    return (
        f"the answer is a full prefill's: its estimated risk exceeded {found.limit:.1%}; {found.seconds * 1000:.0f} ms"
    )


def _confirmation_line(found: Confirmation) -> str:
    how = (
        "confirmed: a full prefill gives the same answer"
        if found.confirmed
        else "changed: the answer is a full prefill's"
    )
    return f"{how}; {found.seconds * 1000:.0f} ms, {found.full_ttft_s * 1000:.0f} of them the full prefill"


def show_summary(result: Result, output: Output, seconds: float | None) -> None:
    """Show the sources in the prompt, best first, and one line of figures; all of both with --verbose. In the place of
    the sources of a weak match stands that there is none, and the nearest."""
    chunks, weak = by_rank(result.answer.chunks), result.answer.weak_match
    most = len(chunks) if output.verbose else 1 if weak else _MOST_SOURCES
    if weak:
        output.warn("no stored source matches the question well; the answer may be made up")
    for chunk in chunks[:most]:
        place = ", ".join(filter(None, (chunk.source, chunk.place, " / ".join(chunk.headings))))
        output.note(f"{'nearest' if weak else 'source'}: {place}")
    if len(chunks) > most and not weak:
        output.note(f"and {len(chunks) - most} more")
    output.note(summary_line(result.answer, seconds))
    output.detail(detail_line(result.answer) + result.by)


def now() -> float:
    """Return the seconds since this process started."""
    return since_process_start(time.perf_counter())


def by_rank(chunks: Sequence[ChunkUse]) -> list[ChunkUse]:
    """Return searched chunks by rank, then named ones by place in the prompt."""
    return sorted(chunks, key=lambda chunk: (chunk.rank is None, chunk.rank or 0))


def _show_tokens(answer: Answer, tokens: Sequence[Sequence[TokenUse]], output: Output) -> None:
    """Show the beginning of each chunk on stderr, its tokens marked by the origin of their KV."""
    legend = [_marked(kind, kind, output) for kind in _MARKS]
    output.styled([piece for one in legend for piece in (one, ("  ", ""))])
    for chunk, used in zip(answer.chunks, tokens, strict=True):
        output.note(f"{chunk.source}, chunk {chunk.id[:12]}")
        pieces, left = [], _SHOWN
        for kind, run in groupby(used, key=lambda token: token.kind):
            text = "".join(token.text for token in run).replace("\n", " ")[:left]
            left -= len(text)
            if text:
                pieces.append(_marked(kind, text, output))
        output.styled(pieces if left else [*pieces, (" ...", "")])


def _marked(kind: str, text: str, output: Output) -> tuple[str, str]:
    """Return (text, style), with brackets if there are no colours."""
    style, (opening, closing) = _MARKS[kind]
    return (text, style) if output.color else (f"{opening}{text}{closing}", "")


def summary_line(answer: Answer, seconds: float | None) -> str:
    """Return how long the user waited and how much of the prompt's stored KV was computed again."""
    if answer.mode == "full" or not answer.cached_tokens:
        work = f"{counted(answer.prompt_tokens, 'prompt token')}, none of them cached"
        if answer.mode == "full":
            work = f"full prefill of {counted(answer.prompt_tokens, 'token')}"
    else:
        work = f"{answer.recomputed_tokens / answer.cached_tokens:.0%} of {counted(answer.cached_tokens, 'cached token')} recomputed"
    if answer.auto:
        work += " by --ratio auto"
    return work if seconds is None else f"{seconds:.1f} s; {work}"


def detail_line(answer: Answer) -> str:
    """Return tokens, share of the work, time from the known question to the first token, and decoding speed."""
    parts = [f"{counted(answer.prompt_tokens, 'prompt token')}, {answer.exact_tokens:,} exact"]
    if answer.mode != "full" and answer.cached_tokens:
        parts.append(
            f"{answer.recomputed_tokens:,} recomputed ({answer.recompute_fraction:.0%} of a full prefill's work)"
        )
    t = answer.timing
    if answer.auto:
        parts.append(f"--ratio auto chose {answer.auto.decision.mode} {answer.ratio:.2g}")
    if t.model_load_s:
        parts.append(f"model loaded in {t.model_load_s:.1f} s")
    first = f"then {t.ttft_s * 1000:.0f} ms to the first token"
    if answer.auto:
        first += f" ({answer.auto.predicted_ttft_s * 1000:.0f} predicted)"
    parts.append(first)
    if t.decode_tokens_per_s and len(answer.generated_ids) >= _FEW_TOKENS:
        parts.append(f"{t.decode_tokens_per_s:.0f} tokens/s")
    return ", ".join(parts)


def show_plan(plan: AskPlan, output: Output, *, json: bool, extra: dict[str, Any]) -> None:
    """Show a plan (`ask --dry-run`) on stdout."""
    for note in plan.notes:
        output.warn(note)
    if json:
        output.json({**extra, **vars(plan)})
        return
    if plan.chunks:
        rows = [(c["id"][:12], c["tokens"], c["status"], c["source"]) for c in plan.chunks]
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
            f"--ratio auto: {a['mode']} at ratio {a['ratio']:.2g}, first token after {a['predicted_ttft_s'] * 1000:.0f} ms, "
            f"{a['predicted_full_ttft_s'] * 1000:.0f} ms by a full prefill"
        )


def _explain(answer: Answer, output: Output) -> None:
    """Show each chunk in the prompt's order: how its KV came to be, and its share of the answer's attention."""
    described = [_chunk_words(chunk) for chunk in answer.chunks]
    width = max(map(len, described), default=0)
    for chunk, words in zip(answer.chunks, described, strict=True):
        output.note(f"chunk {chunk.id[:12]}  {words:<{width}}  {chunk.source}")
    if answer.mode == "blend" or answer.ratio_from != "given":
        output.note(f"ratio {answer.ratio:g}, {answer.ratio_from}")
    for line in layer_lines(answer):
        output.note(line)
    if answer.auto:
        _explain_auto(answer.auto, answer, output)


def _chunk_words(chunk: ChunkUse) -> str:
    match chunk.status:
        case "exact":
            how = "as stored, exact here"
        case "computed":
            how = "computed"
        case _:
            how = "as stored" + (f", {chunk.recomputed} recomputed" if chunk.recomputed else "")
    looked = "" if chunk.attention is None else f", {chunk.attention:.0%} of the attention"
    return f"{chunk.tokens} tokens {how}{looked}"


def layer_lines(answer: Answer) -> list[str]:
    """Describe what the layers computed, one line for neighbouring layers that did the same."""
    same = [list(group) for _, group in groupby(answer.layers, key=lambda r: (r.status, r.rows, r.fresh))]
    lines = []
    for group, after in zip_longest(same, same[1:]):
        first, name = group[0], _layers(group[0].layer, group[-1].layer, len(answer.layers))
        verb = "computes" if len(group) == 1 else "compute"
        doubtful = answer.cached_tokens - answer.exact_tokens
        if first.rows == answer.prompt_tokens and not first.fresh:
            what = f"the whole prompt, {first.rows} tokens"
        else:
            some = f"all {doubtful}" if first.fresh == doubtful else f"{first.fresh} of the {doubtful}"
            again = f"{some} inexact cached tokens, and " if first.fresh else ""
            what = f"{again}{first.rows - first.fresh} tokens that are not cached"
        if first.status.name == "CHECK":
            kept = after[0].fresh if after else answer.recomputed_tokens
            what += f"; the {kept} with the largest deviation from the store go on"
        lines.append(f"{name} {verb} {what}")
    return lines


def _layers(first: int, last: int, count: int) -> str:
    if last - first + 1 == count:
        return f"all {count} layers" if count > 1 else "the only layer"
    if first == last:
        return f"layer {first}"
    return f"layers {first} {'and' if last == first + 1 else 'to'} {last}"


def _explain_auto(auto: AutoReport, answer: Answer, output: Output) -> None:
    """Show the parts of the estimate next to the measured times."""
    d, t = auto.decision, answer.timing
    why = f"ratio {d.ratio:.2g}, {d.floor:.2g} at least"
    if d.mode == "full":
        why = "full prefill, which is estimated to be faster than loading and blending"
    output.note(f"auto: {why}; a layer takes {_ms(d.layer_compute_s)} to recompute and {_ms(d.layer_load_s)} to load")
    output.note(
        f"auto: predicted first token {_ms(auto.predicted_ttft_s)} = {_ms(auto.before_s)} before, {_ms(d.chosen.compute_s)} "
        f"computing, {_ms(d.chosen.stall_s)} waiting for {_ms(d.chosen.load_s)} of loading, {_ms(auto.speeds.rest_s)} after; "
        f"a full prefill {_ms(auto.predicted_full_ttft_s)}"
    )
    output.note(
        f"auto: actual first token {_ms(t.ttft_s)}, of it {_ms(t.prefill_s - t.kv_load_stall_s)} computing and "
        f"{_ms(t.kv_load_stall_s)} waiting for {_ms(t.kv_load_s)} of loading"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"
