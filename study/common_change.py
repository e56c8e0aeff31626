"""How near stored KV comes that is changed by what all contexts have in common, without knowing the prompt: a bound for
trained wrappers.

    python study/common_change.py --data FOLDER --places 0,1,2 --out study/results/common_change.json

Every chunk but the first one, which is exact, is collected behind texts that have nothing to do with the question: one
of about 1,250 tokens (`behind one text`), or four of them, whose K before RoPE and V are averaged (`mean of four`).
Soft tokens around a chunk change its KV in a way that depends on the chunk alone; of all such changes the mean over
contexts has the least squared error. Questions are of `musique` (test half), texts are passages of the fit half; KL is
that of study/README.md, at the default's settings.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from cacheblend_store import ChunkStore
from results import Measurements, digits, hardware, nearer, places_of, question_parser, write_result
from sets import study_sets
from torch import Tensor
from wrapped import TOKENS, distance, resolved

from cacheblend_cli.collect import collector
from cacheblend_cli.collect.prefill import ChunkKV, CollectSequence, PrefixKV, collect, collect_prefix
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.evaluation.bootstrap import Bootstrap, difference, mean
from cacheblend_cli.evaluation.chunks import SampleChunks
from cacheblend_cli.evaluation.measures import AnswerLengths, run_full
from cacheblend_cli.evaluation.samples import Sample
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.types import BlendParams

TEXTS = {"alone": 0, "behind one text": 1, "mean of four": 4}
PASSAGES = 2  # of a text
RATIOS = (0.0, 0.05, 0.15)
AGAINST = {"ratio 0 against alone .15": ("{} 0", "alone 0.15"), ".05 against alone .05": ("{} 0.05", "alone 0.05")}


@cache
def texts(data: Path, count: int) -> list[str]:
    """Return texts of passages that no question of the test half has."""
    samples, rng = study_sets()["musique"].samples(data), random.Random(0)
    theirs = {context.text for sample in samples[1::2] for context in sample.contexts}
    left = sorted({context.text for sample in samples[0::2] for context in sample.contexts} - theirs)
    return ["".join(rng.sample(left, PASSAGES)) for _ in range(count)]


@contextmanager
def collected_behind(engine: Engine, before: Sequence[str], first: tuple[int, ...]) -> Iterator[None]:
    """Collect chunks as the mean over these texts before them, all but the first chunk of the prompt."""
    encode = engine.model.tokenizer.encode_text

    def averaged(decoder: Decoder, prefix: PrefixKV, sequences: Sequence[CollectSequence]) -> Iterator[ChunkKV]:
        longer = [longer_prefix(decoder, prefix.token_ids, tuple(encode(text))) for text in before]
        for sequence in sequences:
            places = longer if longer and sequence.token_ids != first else [prefix]
            kvs = [kv for place in places for kv in collect(decoder, place, [sequence])]
            yield ChunkKV(kvs[0].key, _mean([kv.k for kv in kvs]), _mean([kv.v for kv in kvs]))

    with patch.object(collector, "collect", averaged):
        yield


@cache
def longer_prefix(decoder: Decoder, prefix_ids: tuple[int, ...], token_ids: tuple[int, ...]) -> PrefixKV:
    """Return the KV of the prompt's prefix with a text behind it."""
    return collect_prefix(decoder, [*prefix_ids, *token_ids])


def _mean(of_each: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.stack(layer).float().mean(0).to(layer[0].dtype) for layer in zip(*of_each, strict=True)]


def measure(engine: Engine, sample: Sample, data: Path, folder: Path) -> dict[str, float]:
    """Return the mean KL over full prefill's answer, by name and ratio."""
    reference, found = None, dict[str, float]()
    first = tuple(engine.model.tokenizer.encode_text(sample.contexts[0].text))
    for name, count in TEXTS.items():
        with (
            ChunkStore.open(folder / name.replace(" ", "-"), mode="write") as store,
            collected_behind(engine, texts(data, max(TEXTS.values()))[:count], first),
        ):
            request = resolved(engine, store, sample, SampleChunks(engine, store, [sample]))
            reference = reference or run_full(engine, request, AnswerLengths(TOKENS, TOKENS), 0.0)
            for ratio in RATIOS:
                asked = replace(request, blend=BlendParams(ratio=ratio))
                found[f"{name} {ratio:g}"] = distance(engine, asked, reference)
    return found


def figures(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return means and paired differences with 95 % intervals, and each question's figures."""
    interval = Bootstrap(len(records)).interval
    columns = {f"{n} {r:g}": [record[f"{n} {r:g}"] for record in records] for n in TEXTS for r in RATIOS}
    found: dict[str, Any] = {n: {"mean": digits(interval(mean, c)), "by_question": c} for n, c in columns.items()}
    for name in list(TEXTS)[1:]:
        for label, (ours, theirs) in AGAINST.items():
            pair = columns[ours.format(name)], columns[theirs]
            found[f"{name}, {label}"] = {"difference": digits(interval(difference, *pair)), "nearer": nearer(*pair)}
    return found


def main() -> None:
    parser = question_parser(__doc__, "common_change.jsonl")
    parser.add_argument("--places", required=True, help="questions of the half, counted from 0: 3,5")
    arguments = parser.parse_args()
    samples = study_sets()["musique"].samples(arguments.data)[1::2]
    places = places_of(arguments.places)
    setting = {"model": arguments.model, "dtype": arguments.dtype}
    known = Measurements(arguments.records, **setting, ratio=None)

    def one(engine: Engine, store: ChunkStore, sample: Sample, _: float) -> dict[str, float]:
        return measure(engine, sample, arguments.data, Path(store.path).parent / str(len(known.of)))

    found = figures(known.complete(places, samples, one))
    write_result(arguments.out, {**setting, "hardware": hardware(), "places": places, **found})
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
