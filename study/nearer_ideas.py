"""Four ideas that take something from collecting a chunk, against the default: directions of its change, tokens that
enter late with a stored state, pairs of chunks that are exact together, and a prior for the selector.

    python study/nearer_ideas.py --data FOLDER --model FILE.gguf --half fit --places 0-5 --cut 200 --only default
        --only "r 4, share 1" --records FILE.jsonl --out FILE.json

KL is that of study/README.md over the first 32 tokens of full prefill's answer, on questions of `musique` by their
place in a half. --cut takes the first tokens of each passage. A file of records keeps what was measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from cacheblend_store import ChunkStore
from chunk_readings import KINDS, Reading, readings, states_of, texts_of
from directions import directed, ways
from late_tokens import State, entering, prior
from nearer import figures
from pairs import found_samples
from results import Measurements, hardware, places_of, question_parser, write_result
from sets import study_sets
from torch import Tensor
from wrapped import resolved, shortened

from cacheblend_cli.blend import selectors
from cacheblend_cli.engine.engine import Engine, Request
from cacheblend_cli.engine.worker import prefill as worker
from cacheblend_cli.evaluation.chunks import SampleChunks
from cacheblend_cli.evaluation.profile import distance, full_answer
from cacheblend_cli.evaluation.samples import Context, Sample
from cacheblend_cli.types import AskRequest, BlendParams

RATIOS = (0.15, 0.05)


@dataclass(frozen=True)
class Given:
    """What a variant may take of a question. true: hidden states of a full prefill, by layer."""

    readings: dict[bytes, Reading]
    true: dict[int, Tensor]


@dataclass(frozen=True)
class Variant:
    """Something to compare. context: to run in; factor: of the ratio; paired: whether the second chunk is exact; needs:
    what has to be read of the chunks."""

    context: Callable[[Given], AbstractContextManager[Any]] = lambda given: nullcontext()
    factor: float = 1.0
    paired: bool = False
    needs: str = ""


def variants() -> dict[str, Variant]:
    """Return what is compared, by name."""
    found = {
        "default": Variant(),
        "pair exact": Variant(paired=True),
        "pair exact, as many tokens": Variant(paired=True, factor=1.5),
        "twice the ratio": Variant(factor=2.0),
    }
    for kind in KINDS:
        for texts in (1, 2, 4):
            for name, way in ways().items():
                found[f"{name}, {texts} {kind}"] = Variant(
                    lambda given, way=way, kind=kind, texts=texts: directed(given.readings, way, kind, texts),
                    needs=kind,
                )
    for label, at, share in (("1/3", third, 1 / 3), ("1/2", half, 1 / 2), ("2/3", two_thirds, 2 / 3)):
        for before in (1 / 3, 1 / 2, 2 / 3, 5 / 6, 1.0):
            ratios = before, (1 - share * before) / (1 - share)
            for state in ("alone", "moved", "regressed", "true"):
                name = f"late {ratios[0]:.2f} and {ratios[1]:.2f} from {label}, {state}"
                found[name] = Variant(partial(_late, at=at, ratios=ratios, state=state), needs="states")
    return found | _priors()


def _priors() -> dict[str, Variant]:
    found = dict[str, Variant]()
    for layers in ("probe", "all"):
        for over in ("sum", "max"):
            for rows in ("", " a row"):
                for among in (0.1, 0.2):
                    for way, amount in (
                        *(("times", a) for a in (-0.5, 0.3, 0.5, 1.0, 3.0)),
                        *(("plus", b) for b in (1.0, 3.0)),
                    ):
                        fields = {"layers": layers, "over": over, "among": among, "per_row": bool(rows)}
                        fields |= {"times": 0.0, "plus": 0.0, way: amount}
                        name = f"prior {layers} {over}{rows} {among:g}, {way} {amount:g}"
                        found[name] = Variant(partial(_prior, fields=fields), needs="received")
    return found


def third(layers: int) -> int:
    return round(layers / 3)


def half(layers: int) -> int:
    return round(layers / 2)


def two_thirds(layers: int) -> int:
    return round(2 * layers / 3)


def _late(
    given: Given, at: Callable[[int], int], ratios: tuple[float, float], state: State
) -> AbstractContextManager[Any]:
    return patch.object(worker, "blended_layers", entering(given.readings, given.true, at, ratios, state))


def _prior(given: Given, fields: dict[str, Any]) -> AbstractContextManager[Any]:
    return patch.object(selectors, "QueryAttention", prior(given.readings, **fields))


def measure(
    data: Path,
    cut: int,
    ratios: list[float],
    names: list[str],
    engine: Engine,
    store: ChunkStore,
    sample: Sample,
    _: float,
) -> dict[str, Any]:
    """Return the mean KL over full prefill's answer, by ratio and name."""
    sample, known = shortened(engine, sample, cut), variants()
    chunks = SampleChunks(engine, store, [sample])
    request = resolved(engine, store, sample, chunks)
    full, given, found = full_answer(engine, request), _given(engine, request, sample, data, cut, names), {}
    pair = paired(engine, store, sample, request) if any(known[name].paired for name in names) else request
    for ratio in ratios:
        for name in names:
            one = known[name]
            asked = pair if one.paired else request
            with one.context(given):
                blend = BlendParams(ratio=min(1.0, one.factor * ratio))
                found[f"{name} {ratio:g}"] = distance(engine, replace(asked, blend=blend), full)
    return {"kl": found}


def _given(engine: Engine, request: Request, sample: Sample, data: Path, cut: int, names: list[str]) -> Given:
    """Read what the variants need."""
    needs = {variants()[name].needs for name in names} - {""}
    if not needs:
        return Given({}, {})
    decoder = engine.model.decoder
    count = len(decoder.layers)
    layers = [at(count) for at in (third, half, two_thirds)] if "states" in needs else []
    wanted = {"kinds": [kind for kind in KINDS if kind in needs], "layers": layers}
    read = readings(engine, request, sample, texts_of(engine, data, cut), wanted)
    true = states_of(decoder, request.plan.token_ids, 0, layers, watch=False)[0] if layers else {}
    return Given(read, true)


def paired(engine: Engine, store: ChunkStore, sample: Sample, request: Request) -> Request:
    """Return the request with the second chunk collected behind the first, which makes it exact."""
    first, second, *others = sample.contexts
    page = replace(sample, contexts=(first, Context(second.text, before=(first.text,)), *others))
    chunks = SampleChunks(engine, store, [page])
    chunks.store([page], ["document"])
    found = engine.resolve(store, AskRequest(sample.question, chunks.keys(page, "document")))
    statuses = [chunk.status for chunk in found.plan.chunks]
    assert statuses == ["exact", "exact", *["blended"] * len(others)], statuses
    assert found.plan.token_ids == request.plan.token_ids
    return found


def samples_of(data: Path, prompts: str) -> list[Sample]:
    """Return questions over their first passages, or over what a search finds: with a pair first, or as found."""
    return study_sets()["musique"].samples(data) if prompts == "first" else found_samples(data, prompts == "pairs")


def main() -> None:
    parser = question_parser(__doc__, "nearer_ideas.jsonl")
    parser.add_argument("--half", choices=("fit", "test"), default="fit")
    parser.add_argument("--prompts", choices=("first", "pairs", "hits"), default="first", help="see `samples_of`")
    parser.add_argument("--places", default="0-4", help="questions of the half, counted from 0: 3,5-7")
    parser.add_argument("--cut", type=int, metavar="TOKENS", default=200, help="take the first tokens of each passage")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="variants to measure (repeatable)")
    parser.add_argument("--list", action="store_true", help="print the names of all variants")
    parser.add_argument("--ratio", type=float, action="append", default=[], help="instead of .15 and .05 (repeatable)")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(variants()))
        return
    torch.set_num_threads(arguments.threads)
    names = list(dict.fromkeys(["default", *arguments.only]))
    if wrong := [name for name in names if name not in variants()]:
        parser.error(f"there are no variants {wrong}")
    samples = samples_of(arguments.data, arguments.prompts)[("fit", "test").index(arguments.half) :: 2]
    samples = [sample for sample in samples if sample.contexts]
    places = places_of(arguments.places)
    ratios = arguments.ratio or list(RATIOS)
    of = {"half": arguments.half, "cut": arguments.cut, "names": names, "ratios": ratios}
    of |= {"prompts": arguments.prompts} if arguments.prompts != "first" else {}
    setting = {"model": arguments.model, "dtype": arguments.dtype, "ratio": 0.0, **of}
    one = partial(measure, arguments.data, arguments.cut, ratios, names)
    rows = figures(Measurements(arguments.records, **setting).complete(places, samples, one))
    about = {"model": Path(arguments.model).stem, "dtype": arguments.dtype, "cut": arguments.cut}
    about |= {"half": arguments.half, "hardware": hardware()}
    write_result(arguments.out, {**about, "places": places, "questions": len(places), "rows": rows})
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
