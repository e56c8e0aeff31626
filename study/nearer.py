"""Ways to spend the same number of recomputed tokens, against the default: two passes, budgets by layer, other
parameters of the regression, another sum of the question's attention.

    python study/nearer.py --data FOLDER --model FILE.gguf --places 0-4 --cut 200 --out study/results/qwen/nearer.json

KL is that of study/README.md over the first 32 tokens of full prefill's answer, on questions of `musique`'s fit half by
their place. --cut takes the first tokens of each passage. A file of records keeps what was measured.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from cacheblend_store import ChunkStore
from results import Measurements, digits, hardware, nearer, p90, places_of, question_parser, write_result
from sets import study_sets
from torch import Tensor
from wrapped import resolved, shortened

from cacheblend_cli.blend import corrections, prefill
from cacheblend_cli.blend import evidence as blend_evidence
from cacheblend_cli.blend.evidence import BeforeLayers, Look, attention_peaks
from cacheblend_cli.blend.policy import BlendPolicy
from cacheblend_cli.blend.prefill import BlendSteps, PrefillResult
from cacheblend_cli.blend.prompt import Prompt
from cacheblend_cli.blend.selectors import Evidence, choose
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.worker import prefill as worker
from cacheblend_cli.evaluation.bootstrap import Bootstrap, difference, mean
from cacheblend_cli.evaluation.chunks import SampleChunks
from cacheblend_cli.evaluation.profile import distance, full_answer
from cacheblend_cli.evaluation.samples import Sample
from cacheblend_cli.kv.forward import FreshKV, LayerStep, Pass, layer_by_layer
from cacheblend_cli.kv.rows import Rows
from cacheblend_cli.model.decoder import DecoderLayer
from cacheblend_cli.types import BlendParams

RATIOS = (0.15, 0.05)


class Leaving(BlendSteps):
    """More tokens in the first two thirds of the layers and fewer in the others: those with the highest scores go
    on."""

    def choose_before(self, evidence: Evidence) -> None:
        self._scores = torch.zeros(self._prompt.plan.num_tokens)
        self._scores[self._all.positions] = self._policy.selector.scores(self._all, evidence)
        self._count = self._policy.checks[0][1] * len(self._all)
        self._fewer_from = round(2 / 3 * len(self._prompt.decoder.layers))
        self._narrow(round(4 / 3 * self._count))

    def at(self, layer: DecoderLayer) -> LayerStep:
        step = super().at(layer)
        return LayerStep(next_rows=self._leave) if layer.index == self._fewer_from else step

    def _leave(self, fresh: FreshKV) -> Tensor:
        self._narrow(round(1 / 3 * self._count))
        return torch.searchsorted(fresh.rows.positions, self.rows.positions)

    def _narrow(self, count: int) -> None:
        self._keep(self.candidates.take(choose(self._scores[self.candidates.positions], count, self.candidates)))


class Watching(BlendSteps):
    """The default's steps, that also keep the largest attention weight of the suffix on each candidate, over the KV as
    it is then."""

    layers: frozenset[int] = frozenset()
    _peaks: Tensor

    @property
    def found(self) -> Tensor:
        return self._peaks[self._all.positions]

    def queries(self, layer: DecoderLayer, q: Tensor, rows: Rows) -> None:
        num = len(self._prompt.plan.segments[-1].token_ids)
        if layer.index == 0:
            self._peaks = torch.zeros(self._prompt.plan.num_tokens)
        if layer.index in self.layers and len(q) >= num:
            attention_peaks(self._prompt.sequence, layer, q[-num:], rows.positions[-num:], rows, self._peaks)


class Second(BlendSteps):
    """A second pass over other tokens, over the KV that the first one left. first: positions that it recomputed."""

    first: Tensor
    scores: Tensor
    count: int

    def choose_before(self, evidence: Evidence) -> None:
        done = torch.isin(self._all.positions, self.first)
        kept = self._all.take(choose(self.scores.masked_fill(done, -1), self.count, self._all))
        self._keep(kept)
        if self._policy.correction is not None:
            known = torch.cat((kept.positions, self.first)).unique()
            both = self._all.take(torch.searchsorted(self._all.positions, known))
            self._both, self._own = both, torch.searchsorted(known, kept.positions)
            self._correction = self._policy.correction(self._prompt, self._all, both)

    def fresh(self, fresh: FreshKV) -> None:
        """Correct the others; tokens of the first pass have not changed since."""
        if self._correction is None or fresh.layer.index == 0:
            return
        k, v = corrections.old_kv(fresh.layer, self._prompt.rows(self._both.positions))
        k[self._own], v[self._own] = fresh.k[self._candidate_index].float(), fresh.v[self._candidate_index].float()
        self._correction.apply(fresh.layer, k, v)


class Summed(Look):
    """The sum over the probe layers of the largest weight in each."""

    def queries(self, layer: DecoderLayer, q: Tensor, rows: Rows) -> None:
        total, self._peaks = self._peaks, torch.zeros_like(self._peaks)
        super().queries(layer, q, rows)
        self._peaks += total


def in_two(share: float) -> Callable[..., Pass[PrefillResult]]:
    """Return `blended_layers` in two passes; the second one's tokens are chosen by the question's attention in the
    first. share: of the tokens, in the first one."""

    def run(prompt: Prompt, policy: BlendPolicy, output_positions: Tensor | None = None) -> Pass[PrefillResult]:
        num_tokens = prompt.plan.num_tokens
        outputs = torch.tensor([num_tokens - 1]) if output_positions is None else output_positions
        suffix = torch.arange(num_tokens - len(prompt.plan.segments[-1].token_ids), num_tokens)
        layer, ratio = policy.checks[0]
        steps = Watching(prompt, replace(policy, checks=((layer, share * ratio),)), suffix)
        steps.layers = frozenset(policy.probe_layers)
        evidence = BeforeLayers(prompt, policy.probe_layers)
        yield from evidence.probe(steps.candidates)
        steps.choose_before(evidence)
        first = steps.candidates.positions
        yield from layer_by_layer(prompt.decoder, steps.rows, prompt.token_ids[steps.rows.positions], steps)
        again = Second(prompt, policy, outputs)
        again.first, again.scores = first, steps.found
        again.count = round(ratio * len(steps.found)) - len(first)
        again.choose_before(evidence)
        rows = again.rows
        hidden = yield from layer_by_layer(prompt.decoder, rows, prompt.token_ids[rows.positions], again)
        assert hidden is not None
        return PrefillResult(hidden.logits(prompt.decoder), again.candidates.positions, steps.reports + again.reports)

    return run


class Sized(corrections.Regression):
    """The regression, with V moved by its size in every layer."""

    def apply(self, layer: DecoderLayer, k: Tensor, v: Tensor) -> None:
        if layer.attention.sliding_window is None:
            layer = copy(layer)
            layer.attention = replace(layer.attention, sliding_window=1 << 30)
        super().apply(layer, k, v)


def noisier(tokens: int) -> AbstractContextManager[Any]:
    """Let the regression see more noise where few tokens of a chunk are known: 1 + tokens / known as much."""
    plain = corrections._noise

    def noise(size: Tensor, share: Tensor) -> Tensor:
        return plain(size, share) * (1 + tokens / (share > 0).sum(1, keepdim=True))

    return patch.object(corrections, "_noise", noise)


@contextmanager
def shrunk(tokens: int) -> Iterator[None]:
    """Move a chunk by known / (known + tokens) of what the regression predicts."""
    noise, solved, known = corrections._noise, corrections._solved, list[Tensor]()

    def counting(size: Tensor, share: Tensor) -> Tensor:
        known[:] = [(share > 0).sum(1)[:, None, None]]
        return noise(size, share)

    def shorter(lower: Tensor, b: Tensor) -> Tensor:
        return solved(lower, b) * (known[0] / (known[0] + tokens))

    with patch.object(corrections, "_noise", counting), patch.object(corrections, "_solved", shorter):
        yield


def variants() -> dict[str, tuple[Callable[[], AbstractContextManager[Any]], dict[str, Any]]]:
    """Return what is compared: a context to run in, and fields of BlendParams, by name."""
    two = partial(patch.object, worker, "blended_layers")
    value = partial(patch.object, corrections)
    return {
        "default": (nullcontext, {}),
        "no correction": (nullcontext, {"correction": "none"}),
        "two passes, 1/2 each": (partial(two, in_two(0.5)), {}),
        "two passes, 3/4 and 1/4": (partial(two, in_two(0.75)), {}),
        "by layer: 4/3, from two thirds on 1/3": (partial(patch.object, prefill, "BlendSteps", Leaving), {}),
        "V by its size in all layers": (partial(patch.dict, corrections.CORRECTIONS, {"regression": Sized}), {}),
        "K's common move .65": (partial(value, "COMMON", 0.65), {}),
        "chunk's correlation .25 for 2": (partial(value, "CHUNK", 0.25), {}),
        "chunk's correlation .5 for 2": (partial(value, "CHUNK", 0.5), {}),
        "noise 2 for .5": (partial(value, "NOISE", 2.0), {}),
        "noise times 1 + 10 / known": (partial(noisier, 10), {}),
        "noise times 1 + 30 / known": (partial(noisier, 30), {}),
        "move times known / (known + 3)": (partial(shrunk, 3), {}),
        "move times known / (known + 6)": (partial(shrunk, 6), {}),
        "weights summed over layers": (partial(patch.object, blend_evidence, "Look", Summed), {}),
    }


def measure(
    cut: int | None, names: list[str], engine: Engine, store: ChunkStore, sample: Sample, _: float
) -> dict[str, Any]:
    """Return the mean KL over full prefill's answer, by ratio and name."""
    sample = sample if cut is None else shortened(engine, sample, cut)
    request = resolved(engine, store, sample, SampleChunks(engine, store, [sample]))
    full, found = full_answer(engine, request), dict[str, float]()
    for ratio in RATIOS:
        for name in names:
            context, fields = variants()[name]
            with context():
                asked = replace(request, blend=BlendParams(ratio=ratio, **fields))
                found[f"{name} {ratio:g}"] = distance(engine, asked, full)
    return {"kl": found}


def figures(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per ratio and variant: mean and 90th percentile, the mean's difference from the default's (values
    with 95 % intervals), the geometric mean of KL over the default's, and on how many questions the variant is
    nearer."""
    bootstrap, rows = Bootstrap(len(records)), []
    for label in records[0]["kl"]:
        own = [record["kl"][label] for record in records]
        default = [record["kl"][f"default {label.rpartition(' ')[2]}"] for record in records]
        rows.append(
            {
                "label": label,
                "kl": digits(bootstrap.interval(mean, own)),
                "kl_p90": digits(bootstrap.interval(p90, own)),
                "less_default": digits(bootstrap.interval(difference, own, default)),
                "share": round(statistics.geometric_mean(a / b for a, b in zip(own, default, strict=True)), 3),
                "nearer": nearer(own, default),
            }
        )
    return rows


def main() -> None:
    parser = question_parser(__doc__, "nearer.jsonl")
    parser.add_argument("--places", default="0-4", help="questions of the fit half, counted from 0: 3,5-7")
    parser.add_argument("--cut", type=int, metavar="TOKENS", help="take only the first tokens of each passage")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    names = list(variants())
    samples, places = study_sets()["musique"].samples(arguments.data)[0::2], places_of(arguments.places)
    setting = {"model": arguments.model, "dtype": arguments.dtype, "ratio": 0.0, "cut": arguments.cut, "names": names}
    found = figures(
        Measurements(arguments.records, **setting).complete(places, samples, partial(measure, arguments.cut, names))
    )
    about = {
        "model": Path(arguments.model).stem,
        "dtype": arguments.dtype,
        "cut": arguments.cut,
        "hardware": hardware(),
    }
    write_result(arguments.out, {**about, "places": places, "questions": len(places), "rows": found})
    for row in found:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
