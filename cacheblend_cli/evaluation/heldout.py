"""Scoring on questions that bring their own contexts: every mode over the same stored chunks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cacheblend_store import ChunkStore

from cacheblend_cli.api import BlendConfig, Engine, SamplingParams
from cacheblend_cli.corpus.chunker import Chunk
from cacheblend_cli.engine.collect import collect, collect_prefix
from cacheblend_cli.engine.precompute import PREFIX_SOURCE, Collection, PlannedChunk, collect_sequences, store_chunk
from cacheblend_cli.errors import UsageError
from cacheblend_cli.evaluation.scores import exact_match, f1


@dataclass(frozen=True)
class Sample:
    """A question with references and the chunk texts of its prompt, in order. tags: for reporting apart."""

    question: str
    answers: tuple[str, ...]
    texts: tuple[str, ...]
    tags: dict[str, Any] = field(default_factory=dict)


@dataclass
class Score:
    """What one setting reached. Seconds are medians over the samples."""

    label: str
    samples: int = 0
    correct: int = 0
    f1_sum: float = 0.0
    ttft: list[float] = field(default_factory=list)
    fractions: list[float] = field(default_factory=list)
    by_tag: dict[str, list[bool]] = field(default_factory=dict)

    @property
    def accuracy(self) -> float:
        return self.correct / self.samples if self.samples else 0.0

    @property
    def mean_f1(self) -> float:
        return self.f1_sum / self.samples if self.samples else 0.0

    @property
    def ttft_s(self) -> float:
        return sorted(self.ttft)[len(self.ttft) // 2] if self.ttft else 0.0

    @property
    def recompute_fraction(self) -> float:
        return sum(self.fractions) / len(self.fractions) if self.fractions else 0.0


def read_samples(path: Path, limit: int | None = None) -> list[Sample]:
    """JSON lines of {question, answers, ctxs: [{title, text}], ...}. Raises UsageError on a line that is not."""
    samples: list[Sample] = []
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            if limit is not None and len(samples) >= limit:
                break
            try:
                row = json.loads(line)
                texts = tuple(c["text"] for c in row["ctxs"])
                tags = {k: v for k, v in row.items() if k not in ("question", "answers", "ctxs")}
                samples.append(Sample(row["question"], tuple(row["answers"]), texts, tags))
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(
                    f"{path}:{number} is not a sample: {error!r}", "see `question`, `answers`, `ctxs`"
                ) from error
    return samples


def store_texts(engine: Engine, store: ChunkStore, texts: Iterable[str]) -> dict[str, bytes]:
    """Collect every distinct text as a chunk of its own. Returns text -> key."""
    collection: Collection = engine.collection()
    prefix = collect_prefix(
        engine.model.decoder, collection.prefix_ids, engine.config.block_size, collection.prefix_key
    )
    if prefix.token_ids:
        chunk = Chunk(0, "", prefix.token_ids, 0, 0)
        store_chunk(
            store, collection, PlannedChunk(collection.prefix_key, PREFIX_SOURCE, chunk, (), "prefix"), prefix.kv
        )
    planned, keys = [], {}
    for text in dict.fromkeys(texts):
        ids = tuple(engine.model.tokenizer.encode_text(text))
        keys[text] = collection.key(ids)
        planned.append(PlannedChunk(keys[text], "(sample)", Chunk(0, text, ids, 0, len(text)), (), "sink"))
    planned = [p for p in planned if store.get_chunk(p.key) is None]
    kvs = collect(engine.model.decoder, prefix, collect_sequences(planned), engine.config.block_size)
    for p, kv in zip(planned, kvs, strict=True):
        store_chunk(store, collection, p, kv)
    return keys


def score(
    engine: Engine,
    store: ChunkStore,
    samples: Sequence[Sample],
    keys: dict[str, bytes],
    settings: Sequence[tuple[str, BlendConfig]],
    on_sample: Callable[[], None] = lambda: None,
    max_tokens: int = 24,
) -> list[Score]:
    """Answer every sample greedily under every setting."""
    scores = [Score(label) for label, _ in settings]
    for sample in samples:
        chunk_keys = [keys[t] for t in sample.texts]
        for (_, blend), result in zip(settings, scores, strict=True):
            answer = engine.ask(
                store, sample.question, chunk_keys, blend, SamplingParams(max_tokens=max_tokens), save_holes=False
            )
            right = exact_match(answer.text, sample.answers)
            result.samples += 1
            result.correct += right
            result.f1_sum += f1(answer.text, sample.answers)
            result.ttft.append(answer.timing.ttft_s)
            result.fractions.append(1.0 if blend.mode == "full" else answer.recompute_fraction)
            for name, value in sample.tags.items():
                result.by_tag.setdefault(f"{name}={value}", []).append(right)
        on_sample()
    return scores
