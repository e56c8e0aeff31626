"""How far blended answers are from full prefill's, and what closes the gap: the study behind docs/fidelity_handbook.md.

    python benchmarks/fidelity_handbook.py [--records FILE] [--only GROUP] [--report]
    python benchmarks/fidelity_handbook.py --out FILE.json [--data FILE] [--model DIR] [--limit N] ...

Every setting is measured on every question, against one full prefill of the same token ids. Writes
benchmarks/results/fidelity_handbook.json and the tables and plots of docs/fidelity_handbook.md, or those of another --out. --only replaces
groups of the result that is there. --records keeps what is measured and goes on from it; --report draws again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from cacheblend_store import ChunkStore
from contexts import hardware
from fidelity_handbook_report import merged, mismatch, write_report
from fidelity_variants import ExpectedContexts, bottom_right, scaled_keys

from cacheblend_cli.api import BlendConfig, Engine, EngineConfig
from cacheblend_cli.evaluation.demo_table import spellable_samples
from cacheblend_cli.evaluation.evaluate import FULL, NOISE_FLOOR, EvaluateOptions, evaluate
from cacheblend_cli.evaluation.records import RecordFile
from cacheblend_cli.evaluation.samples import Sample, read_samples
from cacheblend_cli.evaluation.settings import Prefill, Setting
from cacheblend_cli.evaluation.summary import Summary, summarise

ROOT = Path(__file__).parent.parent
OUT, PAGE = ROOT / "benchmarks/results/fidelity_handbook.json", ROOT / "docs/fidelity_handbook.md"
ANSWER_TOKENS = 24
RATIOS = (0.05, 0.15, 0.30)
TIMES = ("ttft_s", "prefill_s")
"""Left out: the study does not ask for a quiet machine. benchmarks/prefill.py measures time."""
REUSE = Setting("reuse", BlendConfig(mode="reuse"))


def blend(label: str, context: str = "sink", prefill: Prefill | None = None, **config: Any) -> Setting:
    return Setting(label, BlendConfig(**{"correction": "none", **config}), context, prefill)


def over(ratios: Iterable[float], name: str, selector: str, context: str = "sink", **config: Any) -> list[Setting]:
    return [blend(f"{name} {r:g}", context, selector=selector, ratio=r, **config) for r in ratios]


def groups() -> dict[str, list[Setting]]:
    """What is compared, a table each. All but `expected` use one store."""
    shifted: dict[str, Any] = {"correction": "mean-shift"}
    moved: dict[str, Any] = {"correction": "regression"}
    return {
        "selectors": [
            *(s for n in ("random", "first", "hkvd", "perturb", "query", "draft") for s in over(RATIOS, n, n)),
        ],
        "budget": [
            *over((0.15,), "hkvd on v", "hkvd", deviation="v"),
            *over((0.15,), "hkvd on k and v", "hkvd", deviation="kv"),
            blend("hkvd 1:0.3,3:0.15", selector="hkvd", checks=((1, 0.3), (3, 0.15))),
            blend("perturb 1:0.3,3:0.15", selector="perturb", checks=((1, 0.3), (3, 0.15))),
            blend("perturb at layer 3 0.15", selector="perturb", check_layer=3, ratio=0.15),
            *over((0.15,), "hkvd, runs of 4", "hkvd", block=4),
            *over((0.15,), "draft, runs of 4", "draft", block=4),
            *over((0.15,), "query, nucleus .5", "query", nucleus=0.5),
            *over((0.15,), "first:4+query", "first:4+query"),
            *over((0.15,), "first:4+hkvd", "first:4+hkvd"),
        ],
        "corrections": [
            *over((0.05, 0.10, 0.15), "random, shifted", "random", **shifted),
            *over((0.05, 0.15), "first, shifted", "first", **shifted),
            *over((0.15,), "hkvd, shifted", "hkvd", **shifted),
            *over((0.05, 0.15), "query, shifted", "query", **shifted),
            *over((0.05, 0.15), "draft, shifted", "draft", **shifted),
            *over((0.02, 0.05, 0.10, 0.15), "random:2+draft, shifted", "random:2+draft", **shifted),
            *(
                blend(f"hkvd 0.15, keys x {f:g}", prefill=scaled_keys(f), selector="hkvd", ratio=0.15, **shifted)
                for f in (0.9, 1.1)
            ),
        ],
        "regression": [
            *over((0.05, 0.15), "random, regression", "random", **moved),
            *over((0.05, 0.15), "query, regression", "query", **moved),
            *over((0.05, 0.15), "random:2+draft, regression", "random:2+draft", **moved),
            *over((0.05, 0.15), "query, document, regression", "query", "document", **moved),
        ],
        "contexts": [
            Setting("reuse, document", BlendConfig(mode="reuse"), "document"),
            *over((0.02, 0.05, 0.15), "query, document", "query", "document"),
            *over((0.05, 0.15), "hkvd, document", "hkvd", "document"),
            *over((0.05, 0.15), "first, document", "first", "document"),
            *over((0.05, 0.15), "random, document", "random", "document"),
            *over((0.05,), "draft, document", "draft", "document"),
            *over((0.05,), "query, document, shifted", "query", "document", **shifted),
            Setting("reuse, neighbours", BlendConfig(mode="reuse"), "neighbours"),
            *over((0.15,), "hkvd, neighbours", "hkvd", "neighbours"),
            *over((0.15,), "query, neighbours", "query", "neighbours"),
        ],
        "mask": [
            *(blend(f"hkvd {r:g}, bottom-right", prefill=bottom_right, selector="hkvd", ratio=r) for r in RATIOS),
            *(blend(f"random {r:g}, bottom-right", prefill=bottom_right, selector="random", ratio=r) for r in (0.15,)),
            *(blend(f"draft {r:g}, bottom-right", prefill=bottom_right, selector="draft", ratio=r) for r in (0.15,)),
        ],
    }


def expected_settings(contexts: ExpectedContexts) -> list[Setting]:
    """Over the mean KV of several contexts. The labels are their own: these chunks are not what the others reuse."""
    run = contexts.prefill
    return [
        blend("reuse, expected", prefill=run, mode="reuse"),
        *(blend(f"spread {r:g}, expected", prefill=run, selector="spread", ratio=r) for r in RATIOS),
        blend("hkvd 0.15, expected", prefill=run, selector="hkvd", ratio=0.15),
        blend("spread 0.15, expected, shifted", prefill=run, selector="spread", ratio=0.15, correction="mean-shift"),
    ]


def measure(
    engine: Engine, samples: list[Sample], records: RecordFile, only: set[str]
) -> tuple[dict[str, list[str]], list[Summary]]:
    """The settings of each group, and a summary of every setting."""
    wanted = {name: settings for name, settings in groups().items() if not only or name in only}
    settings = [FULL, REUSE, NOISE_FLOOR, *(s for group in wanted.values() for s in group)]
    named = {name: [s.label for s in group] for name, group in wanted.items()}

    def progress(done: int, total: int, text: str) -> None:
        if done % 20 == 0 or done == total:
            print(f"{done}/{total}", file=sys.stderr, flush=True)

    with (
        tempfile.TemporaryDirectory(prefix="cacheblend-fidelity-") as folder,
        ChunkStore.open(Path(folder) / "plain", mode="write") as store,
        ChunkStore.open(Path(folder) / "expected", mode="write") as other,
    ):
        results = evaluate(
            engine, store, samples, settings, EvaluateOptions(ANSWER_TOKENS, records), on_progress=progress
        )
        if not only or "expected" in only:
            contexts = ExpectedContexts(engine, other)
            contexts.collect(samples)
            more = expected_settings(contexts)
            named["expected"] = [s.label for s in more]
            found = evaluate(
                engine, other, samples, [FULL, *more], EvaluateOptions(ANSWER_TOKENS, records), on_progress=progress
            )
            results.settings += more
            results.by_label |= {s.label: found.by_label[s.label] for s in more}
    return named, summarise(results, baseline=REUSE.label)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=None, help="default: the demo's held-out questions")
    parser.add_argument("--model", default="handbook", help="default: the handbook's")
    parser.add_argument("--limit", type=int, default=None, help="the first questions only")
    parser.add_argument("--records", type=Path, default=None, help="keep records here, and go on from them")
    parser.add_argument(
        "--only", action="append", default=[], choices=(*groups(), "expected"), help="a group alone (repeatable)"
    )
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument(
        "--page", type=Path, default=None, help="default: docs/fidelity_handbook.md; beside another --out, OUT.md"
    )
    parser.add_argument("--report", action="store_true", help="write the page from --out again, measure nothing")
    arguments = parser.parse_args()
    page = arguments.page or (PAGE if arguments.out == OUT else arguments.out.with_suffix(".md"))
    if (arguments.data or arguments.model != "handbook" or arguments.limit) and (arguments.out == OUT or page == PAGE):
        parser.error("docs/fidelity_handbook.md is of the demo's questions, all of them: give --out FILE.json")
    if not arguments.report:
        if arguments.threads:
            torch.set_num_threads(arguments.threads)
        engine = Engine.load(EngineConfig(model=arguments.model or "handbook", dtype="float32"))
        samples = read_samples(arguments.data) if arguments.data else spellable_samples()
        samples = samples[: arguments.limit]
        facts = {"hardware": hardware(), "model": engine.model.name, "questions": len(samples)}
        old = json.loads(arguments.out.read_text()) if arguments.only and arguments.out.exists() else None
        if old and (different := mismatch(old, facts)):
            parser.error(
                f"{arguments.out} differs in {', '.join(different)}: measure all groups, or give another --out"
            )
        with RecordFile(arguments.records) as records:
            named, summaries = measure(engine, samples, records, set(arguments.only))
        result = {
            **facts,
            "questions": summaries[0].samples,
            "groups": named,
            "settings": [{k: v for k, v in s.to_dict().items() if k not in TIMES} for s in summaries],
        }
        result = merged(old, result) if old else result
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    write_report(json.loads(arguments.out.read_text()), page)


if __name__ == "__main__":
    main()
