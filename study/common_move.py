"""How far K follows the change that the chunks of a prompt have in common: all of it, the default's share (COMMON), or
.65 of it.

    python study/common_move.py --data FOLDER --ratio 0.15 --places 45-99 --out study/results/common_move.json

KL is that of study/README.md at the default's settings, over questions of `musique` by their place in a half, paired on
each question. A file of records keeps what was measured; a later run with the same corrections (`blend/corrections.py`)
goes on from it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from cacheblend_store import ChunkStore
from results import Measurements, digits, hardware, median, nearer, p90, places_of, question_parser, write_result
from sets import study_sets
from wrapped import TOKENS, distance, resolved

from cacheblend_cli.blend import corrections
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.evaluation.bootstrap import Bootstrap, difference, mean
from cacheblend_cli.evaluation.chunks import SampleChunks
from cacheblend_cli.evaluation.measures import AnswerLengths, run_full
from cacheblend_cli.evaluation.samples import Sample
from cacheblend_cli.types import BlendParams

SHARES = {"all": 1.0, "default": corrections.COMMON, "0.65": 0.65}


def measure(engine: Engine, store: ChunkStore, sample: Sample, ratio: float) -> dict[str, float]:
    """Return the mean KL over full prefill's answer, by name of the share."""
    request = resolved(engine, store, sample, SampleChunks(engine, store, [sample]))
    reference = run_full(engine, request, AnswerLengths(TOKENS, TOKENS), 0.0)
    asked, found = replace(request, blend=BlendParams(ratio=ratio)), dict[str, float]()
    for name, share in SHARES.items():
        with patch.object(corrections, "COMMON", share):
            found[name] = distance(engine, asked, reference)
    return found


def figures(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return each share's mean, median and 90th percentile, the mean's difference from the whole move with 95 %
    intervals, and on how many questions it is nearer."""
    bootstrap, found = Bootstrap(len(records)), dict[str, Any]()
    plain = [record["all"] for record in records]
    for name in SHARES:
        own = [record[name] for record in records]
        of, less = digits(bootstrap.interval(mean, own)), digits(bootstrap.interval(difference, own, plain))
        tail = {"median": digits(bootstrap.interval(median, own)), "p90": digits(bootstrap.interval(p90, own))}
        found[name] = {"mean": of, **tail, "minus_all": less, "nearer": nearer(own, plain), "by_question": own}
    return found


def main() -> None:
    parser = question_parser(__doc__, "common_move.jsonl")
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--half", choices=("fit", "test"), default="test")
    parser.add_argument("--places", required=True, help="questions of the half, counted from 0: 3,5-7")
    arguments = parser.parse_args()
    samples = study_sets()["musique"].samples(arguments.data)[arguments.half == "test" :: 2]
    places = places_of(arguments.places)
    setting = {name: getattr(arguments, name) for name in ("model", "dtype", "ratio", "half")}
    found = figures(Measurements(arguments.records, **setting).complete(places, samples, measure))
    write_result(arguments.out, {**setting, "hardware": hardware(), "places": places, **found})
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
