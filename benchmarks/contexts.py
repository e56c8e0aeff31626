"""What a chunk was collected behind against what the prompt says: sink, document and neighbours on held-out questions.

    python benchmarks/contexts.py [--data FILE] [--limit N] [--ratio 0.15] [--out benchmarks/results/contexts.json]

Each question is asked over three layouts of its chunks: whole pages; the same chunks shuffled; and without the first
chunk of each page, so that a chunk's left context is *not* in the prompt, and its KV knows what the prompt does not say.
`measure` does it for any engine and samples. Every prompt is compared with a full prefill of the same token ids.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cacheblend_store import ChunkStore

from cacheblend_cli.api import BlendConfig, Engine, EngineConfig
from cacheblend_cli.corpus.contexts import CONTEXTS
from cacheblend_cli.evaluation.bootstrap import Bootstrap, difference
from cacheblend_cli.evaluation.demo_table import spellable_samples
from cacheblend_cli.evaluation.evaluate import FULL, EvaluateOptions, Results, evaluate
from cacheblend_cli.evaluation.records import RecordFile
from cacheblend_cli.evaluation.samples import Sample, read_samples
from cacheblend_cli.evaluation.settings import Setting
from cacheblend_cli.evaluation.speed import device_name
from cacheblend_cli.evaluation.summary import Summary, summarise

ROOT = Path(__file__).parent.parent
ANSWER_TOKENS = 24
DIFFERENCE = "{value:+.3f} ({low:+.3f} to {high:+.3f})"
Progress = Callable[[str, int, int], None]


def layouts(samples: Sequence[Sample], seed: int = 0) -> dict[str, list[Sample]]:
    """The samples in each layout. A sample stays out of the last when its answer stands in a page's first chunk (its
    tag "across" says so; without the tag all are taken) or when nothing would be left of its pages."""
    rng = random.Random(seed)
    shuffled = [replace(s, contexts=tuple(rng.sample(s.contexts, len(s.contexts)))) for s in samples]
    headless = [
        replace(s, contexts=later)
        for s in samples
        if s.tags.get("across", True) and (later := tuple(c for c in s.contexts if c.before))
    ]
    return {"whole pages": list(samples), "chunks shuffled": shuffled, "first chunks left out": headless}


def settings(ratio: float, contexts: Sequence[str] = CONTEXTS) -> list[Setting]:
    """Full prefill, and reuse and blending over chunks of each context."""
    out = [FULL]
    for context in contexts:
        out.append(Setting(f"reuse, {context}", BlendConfig(mode="reuse"), context))
        out.append(Setting(f"hkvd {ratio:g}, {context}", BlendConfig(ratio=ratio, selector="hkvd"), context))
    return out


def measure(
    engine: Engine,
    samples: Sequence[Sample],
    *,
    ratio: float = 0.15,
    contexts: Sequence[str] = CONTEXTS,
    max_tokens: int = ANSWER_TOKENS,
    records: RecordFile | None = None,
    progress: Progress = lambda text, done, total: None,
) -> dict[str, list[dict[str, Any]]]:
    """Layout -> a row a setting: its summary, and its F1 less that of the same setting over `sink` (paired bootstrap)."""
    out = {}
    with (
        tempfile.TemporaryDirectory(prefix="cacheblend-contexts-") as folder,
        ChunkStore.open(Path(folder) / "store", mode="write") as store,
    ):
        for name, laid_out in layouts(samples).items():
            results = evaluate(
                engine, store, laid_out, settings(ratio, contexts), EvaluateOptions(max_tokens, records),
                on_progress=lambda done, total, text, name=name: progress(name, done, total),
            )  # fmt: skip
            out[name] = [_row(summary, results) for summary in summarise(results)]
    return out


def _row(summary: Summary, results: Results) -> dict[str, Any]:
    row = summary.to_dict()
    sink = summary.label.replace(summary.setting["context"], "sink")
    row["f1_less_sink"] = None
    if sink != summary.label and sink in results.by_label:
        ours, theirs = ([r.f1 for r in results.by_label[label]] for label in (summary.label, sink))
        if None not in ours:
            found = Bootstrap(len(ours)).interval(difference, ours, theirs)  # type: ignore[arg-type]
            row["f1_less_sink"] = vars(found) if found else None
    return row


def table(result: dict[str, Any]) -> str:
    h = result["hardware"]
    lines = [
        f"{h['cpu']}, {h['cores']} cores ({h['threads']} threads used), torch {h['torch']}; {result['model']}, fp32, greedy answers. F1 is against the "
        "references, with its difference (95 % paired bootstrap) to a full prefill of the same prompt and to the same "
        "setting over `sink`; KL (nats a token) and same answer are against full prefill.",
    ]
    for name, rows in result["layouts"].items():
        lines += [
            "",
            f"**{name}**, {rows[0]['samples']} questions",
            "",
            "| setting | exact | F1 | F1 less full prefill's | F1 less sink's | KL | same answer | work |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in rows:
            cells = [
                row["label"],
                cell(row["exact_match"], "{value:.1%}"),
                cell(row["f1"], "{value:.3f}"),
                cell(row["f1_difference"], DIFFERENCE),
                cell(row["f1_less_sink"], DIFFERENCE),
                cell(row["kl"], "{value:.3g}"),
                cell(row["same_answer"], "{value:.1%}"),
                f"{row['budget']:.0%}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def cell(interval: dict[str, float] | None, form: str) -> str:
    """An interval's value, low and high as `form` has them; nothing where none was measured."""
    return form.format(**interval) if interval else ""


def hardware() -> dict[str, Any]:
    cpu = device_name(torch.device("cpu"))
    return {"cpu": cpu, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "torch": torch.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=None, help="default: the demo's held-out questions")
    parser.add_argument("--model", default="handbook", help="default: the handbook's")
    parser.add_argument("--limit", type=int, default=None, help="the first questions only")
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--records", type=Path, default=None, help="keep records here, and go on from them")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/contexts.json")
    arguments = parser.parse_args()
    engine = Engine.load(EngineConfig(model=arguments.model or "handbook", dtype="float32"))
    samples = read_samples(arguments.data) if arguments.data else spellable_samples()

    def progress(name: str, done: int, total: int) -> None:
        if done % 50 == 0 or done == total:
            print(f"{name}: {done}/{total}", file=sys.stderr)

    with RecordFile(arguments.records) as records:
        found = measure(engine, samples[: arguments.limit], ratio=arguments.ratio, records=records, progress=progress)
    result = {"hardware": hardware(), "model": engine.model.name, "ratio": arguments.ratio, "layouts": found}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    arguments.out.with_suffix(".md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    main()
