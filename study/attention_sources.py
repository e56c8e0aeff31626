"""Does attention name the source of an answer? The chunk with the most attention, compared with chance and with the
search.

    python study/attention_sources.py [--model smollm2] [--musique musique_dev.json] [--limit 40] [--out
    study/results/attention_sources.json]

Each question is answered by a full prefill over its five best chunks (`--search both`), in an order that does not
depend on their rank. Counted are questions with both answering and other chunks among them. chance: the mean share of
answering chunks. search: the best hit answers. attention: the chunk with the largest share of the answer's attention
answers. a token: the same with the attention divided by the chunk's length. without beginnings: the same without the
first four tokens of each chunk, which attract attention whatever they say.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cacheblend_store import ChunkStore
from search_recall import Asked, Corpus, fill, handbook, musique

from cacheblend_cli.corpus.embedding import find_embedder
from cacheblend_cli.corpus.search import Lookup, search
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.core.report import PrefillReport
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.features import attention_shares
from cacheblend_cli.engine.features.attention_shares import AttentionShares
from cacheblend_cli.types import Answer, AskOptions, AskRequest, BlendParams, SamplingParams

CHUNKS = 5
SINKS = 4  # tokens at the beginning of a chunk
WAYS = ("chance", "search", "attention", "a token", "without beginnings")


class Looks(AttentionShares):
    """Keeps the attention of the last answer, one value for each token of the prompt."""

    last: Looks

    def on_answer(self, report: PrefillReport, index: int, answer: Answer) -> None:
        Looks.last = self
        super().on_answer(report, index, answer)

    def shares(self, skipped: int) -> list[float]:
        """Return the mean attention of each chunk's tokens, without the first `skipped` ones."""
        chunks = [(min(c.start + skipped, c.end - 1), c.end) for c in self._plan.chunks]
        return [float(self._found[0][start:end].mean()) for start, end in chunks]


def measure(engine: Engine, corpus: Corpus, questions: Sequence[Asked], limit: int) -> dict[str, Any]:
    named = dict.fromkeys(WAYS, 0.0)
    count = 0
    with tempfile.TemporaryDirectory() as folder, ChunkStore.open(Path(folder) / "store", mode="write") as store:
        fill(store, corpus)
        lookup = Lookup(CHUNKS, by="both", embedder=find_embedder(""))
        for asked in questions:
            hits = search(store, asked.question, lookup).hits
            right = [(hit.source, hit.index) in asked.answered_by for hit in hits]
            if count == limit or not any(right) or all(right):
                continue
            order = sorted(
                range(len(hits)), key=lambda i: hits[i].key
            )  # independent of rank, since attention depends on the position
            question = AskRequest(
                asked.question, [hits[i].key for i in order], BlendParams(mode="full"), SamplingParams(max_tokens=8)
            )
            answer = engine.run_alone(store, question, AskOptions(save=False))
            shares = [chunk.attention or 0.0 for chunk in answer.chunks]
            count += 1
            print(count, file=sys.stderr, flush=True)
            named["chance"] += sum(right) / len(right)
            named["search"] += right[0]
            for way, found in (
                ("attention", shares),
                ("a token", Looks.last.shares(0)),
                ("without beginnings", Looks.last.shares(SINKS)),
            ):
                named[way] += right[order[found.index(max(found))]]
    return {"count": count, **{way: round(value / max(count, 1), 4) for way, value in named.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--musique", type=Path)
    parser.add_argument("--limit", type=int, default=1000, help="questions of each set")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "attention_sources.json")
    args = parser.parse_args()
    attention_shares.AttentionShares = Looks  # type: ignore[misc]
    engine = Engine.load(EngineConfig(model=args.model))
    sets = {"handbook": handbook()} | ({"musique": musique(args.musique)} if args.musique else {})
    rows = []
    for name, (corpus, asked) in sets.items():
        rows.append({"questions": name, **measure(engine, corpus, asked, args.limit)})
        print(rows[-1], flush=True)
    args.out.write_text(json.dumps({"model": args.model, "results": rows}, indent=1) + "\n")
    print(f"| questions | {' | '.join(WAYS)} |\n|---|{'---|' * len(WAYS)}")
    for row in rows:
        print(f"| {row['questions']}, {row['count']} | {' | '.join(f'{row[way]:.1%}' for way in WAYS)} |")


if __name__ == "__main__":
    main()
