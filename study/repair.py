"""Repair while decoding, simulated: recompute tokens of the prompt that the answer copies or looks at, beside its next
token.

    python study/repair.py --data FOLDER --ratio 0.15 --questions 25 --out study/results/repair.json

Each question of `musique` (test half) is prefilled in full and as `ask` does. The full prefill's greedy answer is then
fed token by token over the blended KV. Beside a token go, as rows through all layers over the KV as it is then,
unchosen tokens of the prompt that were not recomputed before:

- copies: tokens whose two predecessors are the answer's last two tokens, where the prompt has at most eight such
  places;
- looks: the two tokens with the largest attention weight of the token before (any head, the layers that `query`
  probes), above .05;

and the two tokens after each, 16 rows a step at most. KL is that of study/README.md, and default and repair are
compared on the same answer. A file of records keeps what was measured; a later run with the same corrections
(`blend/corrections.py`) goes on from it.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from cacheblend_store import ChunkStore
from results import Measurements, digits, hardware, median, nearer, p90, places_of, question_parser, write_result
from sets import study_sets
from torch import Tensor

from cacheblend_cli.blend.evidence import attention_peaks
from cacheblend_cli.blend.fidelity import divergence, log_distribution
from cacheblend_cli.blend.policy import policy_of
from cacheblend_cli.blend.selectors import Candidates
from cacheblend_cli.engine.engine import Engine, Prefilled
from cacheblend_cli.evaluation.bootstrap import Bootstrap, difference, mean
from cacheblend_cli.evaluation.chunks import SampleChunks
from cacheblend_cli.evaluation.measures import AnswerLengths, run_full
from cacheblend_cli.evaluation.samples import Sample
from cacheblend_cli.kv.forward import Steps, forward
from cacheblend_cli.kv.pool import PagedSequence
from cacheblend_cli.kv.rows import Rows, rows_of
from cacheblend_cli.model.decoder import Decoder, DecoderLayer
from cacheblend_cli.types import AskRequest, BlendParams

TOKENS = 64
GRAM, MOST_PLACES, LOOKS, LEAST_WEIGHT, AFTER, MOST_ROWS = 2, 8, 2, 0.05, 2, 16


class Looks(Steps):
    """The largest attention weight of a pass's last row on each candidate, over the probe layers and their heads.
    kv_len: positions that the row sees."""

    def __init__(self, sequence: PagedSequence, layers: Sequence[int], candidates: Candidates, kv_len: int) -> None:
        self._sequence, self._layers, self._candidates = sequence, frozenset(layers), candidates
        self._peaks = torch.zeros(kv_len)

    @property
    def weights(self) -> Tensor:
        return self._peaks[self._candidates.positions]

    def queries(self, layer: DecoderLayer, q: Tensor, rows: Rows) -> None:
        if layer.index in self._layers:
            attention_peaks(self._sequence, layer, q[-1:], rows.positions[-1:], rows, self._peaks)


def unchosen(done: Prefilled) -> Candidates:
    """Return the tokens of the prompt that blending did not recompute."""
    blended = {p for s in done.plan.segments if s.status == "blended" for p in range(s.start, s.end)}
    positions = torch.tensor(sorted(blended - set(done.result.chosen.tolist())), dtype=torch.int64)
    none = torch.zeros_like(positions)
    return Candidates(positions, none, none)


@torch.no_grad()
def repaired(decoder: Decoder, done: Prefilled, answer_ids: Sequence[int], layers: Sequence[int]) -> tuple[Tensor, int]:
    """Return the logits that predict the answer's tokens, [len(answer_ids), vocab_size], and the number of rows
    recomputed. The prompt's KV is overwritten."""
    ids, candidates = list(done.plan.token_ids), unchosen(done)
    stale, last_position = set(candidates.positions.tolist()), len(ids) - 1
    places: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for place in range(GRAM, len(ids)):
        places[tuple(ids[place - GRAM : place])].append(place)
    logits, wanted, count = [done.logits[None]], list[int](), 0
    for number, token in enumerate(answer_ids[:-1], 1):
        copies = places[tuple([*ids, *answer_ids[:number]][-GRAM:])]
        wanted += copies if len(copies) <= MOST_PLACES else []
        rows = sorted({p + step for p in wanted for step in range(AFTER + 1)} & stale)[:MOST_ROWS]
        stale -= set(rows)
        count += len(rows)
        at = last_position + number
        positions = torch.tensor([*rows, at])
        looks = Looks(done.sequence, layers, candidates, at + 1)
        batch = rows_of(decoder, done.sequence, positions, kv_len=at + 1, rope_len=at + 1)
        logits.append(forward(decoder, batch, torch.tensor([*(ids[p] for p in rows), token]), looks)[-1:])
        left = torch.tensor([p in stale for p in candidates.positions.tolist()], dtype=torch.float32)
        weights, index = (looks.weights * left).topk(min(LOOKS, len(candidates)))
        wanted = candidates.positions[index[weights > LEAST_WEIGHT]].tolist()
    return torch.cat(logits), count


def measure(engine: Engine, store: ChunkStore, sample: Sample, ratio: float) -> dict[str, Any]:
    """Return the KL of each token with the default and with repair, the rows recomputed, and the number of tokens not
    chosen."""
    decoder, chunks = engine.model.decoder, SampleChunks(engine, store, [sample])
    chunks.store([sample], ["sink"])
    request = engine.resolve(store, AskRequest(sample.question, chunks.keys(sample, "sink")))
    full = run_full(engine, request, AnswerLengths(TOKENS, TOKENS), 0.0)
    blend = BlendParams(ratio=ratio)
    done = engine.hold_prefill(replace(request, blend=blend), headroom=TOKENS)
    forced = done.predict(full.answer_ids)
    before = torch.cat((done.logits[None], forced[1:]))
    layers = policy_of(blend, decoder.spec.num_kv_layers, True).probe_layers
    after, count = repaired(decoder, done, full.answer_ids, layers)
    default, repair = (divergence(full.log_p, log_distribution(found)).kl for found in (before, after))
    left = len(unchosen(done))
    done.sequence.release()
    return {"default": default, "repair": repair, "rows": count, "unchosen": left}


def figures(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return means, medians and 90th percentiles over the questions, and the paired difference, with 95 % intervals."""
    bootstrap = Bootstrap(len(records))
    kls = {name: [statistics.fmean(r[name]) for r in records] for name in ("default", "repair")}
    found: dict[str, Any] = {}
    for name, kl in kls.items():
        for measure, of in (("mean", mean), ("median", median), ("p90", p90)):
            found[f"{name}_{measure}"] = digits(bootstrap.interval(of, kl))
    found["difference"] = digits(bootstrap.interval(difference, kls["repair"], kls["default"]))
    found["nearer"] = nearer(kls["repair"], kls["default"])
    found["rows"] = statistics.fmean(r["rows"] for r in records)
    found["unchosen"] = statistics.fmean(r["unchosen"] for r in records)
    return found


def main() -> None:
    parser = question_parser(__doc__, "repair.jsonl")
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--questions", type=int, default=25)
    parser.add_argument("--places", help="these questions of the half, counted from 0: 3,5")
    arguments = parser.parse_args()
    samples = study_sets()["musique"].samples(arguments.data)[1::2]
    named = places_of(arguments.places) if arguments.places else range(arguments.questions)
    setting = {name: getattr(arguments, name) for name in ("model", "dtype", "ratio")}
    found = figures(Measurements(arguments.records, **setting).complete(named, samples, measure))
    write_result(arguments.out, {**setting, "hardware": hardware(), "places": list(named), **found})
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
