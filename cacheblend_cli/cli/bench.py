"""cacheblend bench: speed on this machine next to the cost model's ceiling."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from typer import Option

from cacheblend_cli.cli import options
from cacheblend_cli.cli.output import Output, show_table
from cacheblend_cli.cli.units import format_size
from cacheblend_cli.settings import Settings, grouped
from cacheblend_cli.types import BlendParams

if TYPE_CHECKING:
    from cacheblend_cli.evaluation.bench import BenchReport, Speed
    from cacheblend_cli.evaluation.settings import Setting

_COLUMNS = ("setting", "first token", "faster than full", "ceiling", "measured/ceiling", "KV loaded", "load", "stall")


@options.with_settings(*grouped("model", "machine", but=["tensor_parallel"]), "kv_dtype")
def bench(
    settings: Settings,
    tokens: int | None = Option(
        None, min=1, help="Total tokens of the chunks.", show_default="2048, or as many as fit"
    ),
    chunks: int = Option(8, min=1, help="Number of chunks."),
    question_tokens: int = Option(32, min=1, help="Tokens of the question."),
    ratio: list[float] | None = Option(None, help="Ratio (repeatable).", show_default="as ask"),
    selector: list[str] | None = Option(None, help="Selector (repeatable).", show_default="as ask, and hkvd"),
    rounds: int = Option(3, min=1, help="Runs of each setting after a warm-up."),
    decode_tokens: int = Option(32, min=2, help="Tokens to decode."),
    json: options.Json = False,
) -> None:
    """Measure time to the first token by full prefill, plain reuse and blending, and decoding speed.

    The prompt is random text in a temporary store. Settings take turns in one process; stored KV comes from the page
    cache, including the check of its digests. The ceiling is the cost model's speed-up with free loading and selection.
    """
    output = Output(json=json)
    from cacheblend_cli.evaluation.settings import grid

    def grid_with(blend: BlendParams) -> list[Setting]:
        return grid(
            blend,
            modes=("full", "reuse", "blend"),
            selectors=selector or (settings.selector, "hkvd"),
            ratios=ratio or (blend.ratio,),
            contexts=("sink",),
        )

    blend = BlendParams.of(settings)
    asked = grid_with(blend)  # raise errors before torch is imported
    engine = options.load_engine(settings, output)
    from cacheblend_cli.evaluation.bench import bench as measure
    from cacheblend_cli.evaluation.bench import layout_of

    if settings.ratio == "model":
        asked = grid_with(engine.own_blend(blend)[0])
    layout = layout_of(engine, tokens, chunks, question_tokens, decode_tokens)
    with output.progress("bench") as bar:
        report = measure(engine, asked, layout, rounds=rounds, decode_tokens=decode_tokens, on_run=bar)
    for note in dict.fromkeys(report.notes):
        output.warn(note)
    output.json(asdict(report))
    if not json:
        _show(report, output)


def _show(report: BenchReport, output: Output) -> None:
    lengths = " or ".join(map(str, sorted({min(report.chunk_tokens), max(report.chunk_tokens)})))
    output.note(
        f"{report.model} on {report.device_name}, {report.threads} threads, {report.dtype}, attention by {report.attention_backend}, "
        f"KV stored as {report.kv_dtype}; {report.prompt_tokens:,} tokens in {len(report.chunk_tokens)} chunks of "
        f"{lengths} and a question of {report.question_tokens}; "
        f"{'one round' if report.rounds == 1 else f'medians of {report.rounds} rounds'} after a warm-up"
    )
    show_table(_COLUMNS, [_row(speed) for speed in report.settings], output)
    output.text(f"\ndecode: {report.decode_tokens_per_s:.1f} tokens/s over {report.decode_tokens} tokens")


def _row(speed: Speed) -> list[str]:
    cells = [speed.setting, f"{speed.ttft_s * 1000:.1f} ms"]
    if speed.load_bytes_per_s is None:  # full prefill
        return [*cells, *[""] * (len(_COLUMNS) - 2)]
    cells += [f"{speed.speedup:.2f} x", f"{speed.ceiling:.2f} x", f"{speed.measured_over_ceiling:.0%}"]
    cells += [format_size(speed.kv_bytes_loaded), f"{speed.load_bytes_per_s / 1e9:.2f} GB/s"]
    return [*cells, f"{speed.kv_load_stall_s * 1000:.1f} ms"]
