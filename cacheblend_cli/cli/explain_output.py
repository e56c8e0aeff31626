"""Show `ask --explain`: the origin of the KV of chunks, layers and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, zip_longest

from cacheblend_cli.cli.output import Output
from cacheblend_cli.types import Answer, AutoReport, ChunkUse, TokenUse

_SHOWN = 600  # characters of a chunk
_LEGEND = "(exact, reused: from the store; reused was computed in another context; computed: was not stored)"
_MARKS = {
    "exact": ("36", ("", "")),
    "reused": ("2", ("", "")),
    "recomputed": ("1;4;33", ("[", "]")),
    "computed": ("1;35", ("{", "}")),
}
"""Origin of a token's KV -> SGR style, and brackets for output without colours."""


def show_explanation(answer: Answer, tokens: Sequence[Sequence[TokenUse]], output: Output) -> None:
    """Show the origin of each chunk's KV in prompt order, its share of attention, the work of layers, and tokens."""
    for line in chunk_lines(answer):
        output.note(line)
    if answer.mode == "blend" or answer.ratio_from != "given":
        output.note(f"ratio {answer.ratio:g}, {answer.ratio_from}")
    for line in layer_lines(answer):
        output.note(line)
    if answer.auto:
        _explain_auto(answer.auto, answer, output)
    _show_tokens(answer, tokens, output)


def chunk_lines(answer: Answer) -> list[str]:
    """Describe the origin of each chunk's KV, in prompt order."""
    described = [_describe_chunk(chunk) for chunk in answer.chunks]
    width = max(map(len, described), default=0)
    return [f"chunk {c.id[:12]}  {text:<{width}}  {c.source}" for c, text in zip(answer.chunks, described, strict=True)]


def _describe_chunk(chunk: ChunkUse) -> str:
    match chunk.status:
        case "exact":
            how = " as stored, exact here"
        case "computed":
            how = " computed"
        case _:
            how = f", {chunk.recomputed} of them recomputed" if chunk.recomputed else " as stored, inexact here"
    attention = "" if chunk.attention is None else f", {chunk.attention:.0%} of the attention"
    return f"{chunk.tokens} tokens{how}{attention}"


def layer_lines(answer: Answer) -> list[str]:
    """Describe the work of layers, one line for adjacent layers with the same work."""
    same = [list(group) for _, group in groupby(answer.layers, key=lambda r: (r.status, r.rows, r.fresh))]
    lines = []
    for group, after in zip_longest(same, same[1:]):
        first, name = group[0], _layer_range(group[0].layer, group[-1].layer, len(answer.layers))
        verb = "computes" if len(group) == 1 else "compute"
        doubtful = answer.cached_tokens - answer.exact_tokens
        if first.rows == answer.prompt_tokens and not first.fresh:
            what = f"the whole prompt, {first.rows} tokens"
        else:
            some = f"all {doubtful}" if first.fresh == doubtful else f"{first.fresh} of the {doubtful}"
            again = f"{some} inexact cached tokens, and " if first.fresh else ""
            what = f"{again}{first.rows - first.fresh} tokens that are not cached"
        if first.status == "CHECK":
            kept = after[0].fresh if after else answer.recomputed_tokens
            what += f"; the {kept} with the largest deviation from the store go on"
        lines.append(f"{name} {verb} {what}")
    return lines


def _layer_range(first: int, last: int, count: int) -> str:
    if last - first + 1 == count:
        return f"all {count} layers" if count > 1 else "the only layer"
    if first == last:
        return f"layer {first}"
    return f"layers {first} {'and' if last == first + 1 else 'to'} {last}"


def _explain_auto(auto: AutoReport, answer: Answer, output: Output) -> None:
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


def _show_tokens(answer: Answer, tokens: Sequence[Sequence[TokenUse]], output: Output) -> None:
    """Show the beginning of each chunk on stderr, its tokens marked by the origin of their KV."""
    legend = [_marked(kind, kind, output) for kind in _MARKS]
    output.styled([*(piece for one in legend for piece in (one, ("  ", ""))), (_LEGEND, "2")])
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
