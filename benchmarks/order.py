"""What the order of searched chunks costs and what it does to answers: `--order rank` beside `--order exact`.

    python benchmarks/order.py [--out benchmarks/results/order.json]

The handbook's questions over its own pages, searched by words, with the handbook's model. Counted, not timed: tokens that
are exact where they stand, and the share of the reusable token-layers that is computed again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from cacheblend_store import ChunkStore

from cacheblend_cli.api import Engine, EngineConfig, Lookup, PrecomputeOptions, Question, SamplingParams
from cacheblend_cli.corpus.search import ORDERS
from cacheblend_cli.demo import handbook_dir
from cacheblend_cli.engine.config import AskOptions


def measure(
    engine: Engine, store: ChunkStore, questions: list[dict[str, Any]], order: str, expand: int
) -> dict[str, Any]:
    lookup = Lookup(order=order, expand=expand)
    answers = []
    for row in questions:
        question = Question(row["question"], (), sampling=SamplingParams(max_tokens=24))
        answers.append(engine.ask(store, engine.search(store, question, lookup), AskOptions(save_holes=False)))
    return {
        "order": order,
        "expand": expand,
        "cached_tokens": round(statistics.mean(a.cached_tokens for a in answers), 1),
        "exact_tokens": round(statistics.mean(a.exact_tokens for a in answers), 1),
        "recompute_fraction": round(statistics.mean(a.recompute_fraction for a in answers), 4),
        "right": round(statistics.mean(a.text.strip() == row["answer"] for a, row in zip(answers, questions, strict=True)), 4),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "order.json")
    args = parser.parse_args()
    text = (handbook_dir().parent / "questions.jsonl").read_text(encoding="utf-8")
    questions = [json.loads(line) for line in text.splitlines()]
    engine = Engine.load(EngineConfig(model="handbook", device="cpu", dtype="float32"))
    with tempfile.TemporaryDirectory() as folder, ChunkStore.open(Path(folder) / "store", mode="write") as store:
        engine.precompute(store, [str(handbook_dir())], PrecomputeOptions(chunk_tokens=56), lambda event: None)
        results = [measure(engine, store, questions, order, expand) for expand in (0, 1) for order in ORDERS]
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    print("| order | neighbours | cached tokens | exact | work | right |\n|---|---|---|---|---|---|")
    for r in results:
        print(
            f"| {r['order']} | {r['expand']} | {r['cached_tokens']:.0f} | {r['exact_tokens'] / r['cached_tokens']:.0%} "
            f"| {r['recompute_fraction']:.1%} | {r['right']:.1%} |"
        )


if __name__ == "__main__":
    main()
