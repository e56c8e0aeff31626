"""The default's KL with as many recomputed tokens as a GPU has, with fewer probed layers, and with a regression from
fewer tokens. For study/models.md and study/nearer.md.

    python study/row_tiles.py --data FOLDER --model MODEL [--set musique] [--questions 20]

Questions of the set's test half in bfloat16, over 64 tokens of full prefill's answer, as `run.py --main` has them. KL
is paired with the default's at .15 on a CPU. Run it once for each model.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from cacheblend_store import ChunkStore
from results import hardware, nearer
from sets import study_sets

from cacheblend_cli.blend import corrections, policy
from cacheblend_cli.blend.corrections import Regression
from cacheblend_cli.blend.prompt import Prompt
from cacheblend_cli.blend.selectors import Candidates
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine, Prefilled, Request
from cacheblend_cli.evaluation.bootstrap import Bootstrap, difference
from cacheblend_cli.evaluation.evaluate import EvaluateOptions, Results, evaluate
from cacheblend_cli.evaluation.settings import Setting
from cacheblend_cli.types import BlendParams

TILE = policy.row_tile_of(torch.device("cuda"))
CPU = "as on a CPU"
_tiled_count = policy.tiled_count


def rounded_up(count: int, total: int, fresh: int, row_tile: int) -> int:
    return count + -(count + fresh) % TILE


def rounded_to_nearest(count: int, total: int, fresh: int, row_tile: int) -> int:
    return (count + fresh + TILE // 2) // TILE * TILE - fresh


def rounded_as_on_a_gpu(count: int, total: int, fresh: int, row_tile: int) -> int:
    return _tiled_count(count, total, fresh, TILE)


class FewerKnown(Regression):
    """Regression that learns from at most `most` tokens of a chunk, evenly chosen among the recomputed ones."""

    def __init__(self, prompt: Prompt, every: Candidates, repaired: Candidates, most: int) -> None:
        kept = []
        for chunk in repaired.chunk.unique():
            here = (repaired.chunk == chunk).nonzero().flatten()
            kept.append(here[torch.arange(min(most, len(here))) * len(here) // min(most, len(here))])
        self._kept = torch.cat(kept)
        super().__init__(prompt, every, repaired.take(self._kept))

    def apply(self, layer: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        super().apply(layer, k[self._kept], v[self._kept])


@dataclass(frozen=True)
class Variant:
    """A prefill with another number of recomputed tokens, of probed layers or of known tokens in a chunk. last: share
    of the layers that end with the last probed one."""

    count: Callable[[int, int, int, int], int] = _tiled_count
    last: float | None = None
    most_known: int | None = None

    def __call__(self, engine: Engine, request: Request, /, *, headroom: int = 0) -> Prefilled:
        if self.last is not None:
            layers = engine.model.decoder.spec.num_kv_layers
            probed = round(layers / 3), round(layers * self.last) - 1
            request = replace(request, blend=replace(request.blend, probe_layers=probed))
        with self._changed():
            return engine.hold_prefill(request, headroom=headroom)

    @contextmanager
    def _changed(self) -> Iterator[None]:
        kinds: dict[str, Any] = {}
        if self.most_known is not None:
            kinds["regression"] = partial(FewerKnown, most=self.most_known)
        with patch.object(policy, "tiled_count", self.count), patch.dict(corrections.CORRECTIONS, kinds):
            yield


VARIANTS = {
    CPU: Variant(),
    "rounded up": Variant(rounded_up),
    "rounded to the nearest": Variant(rounded_to_nearest),
    "as on a GPU": Variant(rounded_as_on_a_gpu),
    "probe up to .58 of the layers": Variant(last=0.58),
    "probe up to two thirds": Variant(last=2 / 3),
    "64 known tokens a chunk": Variant(most_known=64),
}


def measure(engine: Engine, data: Path, name: str, questions: int) -> Results:
    settings = [Setting(label, BlendParams(), prefill=variant) for label, variant in VARIANTS.items()]
    samples = study_sets()[name].samples(data)[1::2][:questions]
    with (
        tempfile.TemporaryDirectory(prefix="cacheblend-study-") as folder,
        ChunkStore.open(Path(folder) / "store", mode="write") as store,
    ):
        options = EvaluateOptions(max_tokens=64, keep_chunks=False, own_tokens=1)
        return evaluate(engine, store, samples, settings, options, progress)


def progress(done: int, total: int, text: str) -> None:
    print(f"  {done}/{total}", file=sys.stderr, flush=True)


def lines(results: Results) -> Iterator[str]:
    """Yield a row for each variant."""
    bootstrap = Bootstrap(len(results.full))
    kls = {label: [statistics.fmean(r.kl) for r in results.by_label[label]] for label in VARIANTS}
    for label, kl in kls.items():
        chosen = statistics.fmean(r.recomputed_tokens for r in results.by_label[label])
        found = bootstrap.interval(difference, kl, kls[CPU])
        assert found is not None
        paired = f"{found.value:+.4f} ({found.low:+.4f} to {found.high:+.4f}) | {nearer(kl, kls[CPU])}"
        yield f"| {label} | {chosen:.0f} | {statistics.fmean(kl):.4f} | {statistics.median(kl):.4f} | {paired} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="as of run.py")
    parser.add_argument("--model", required=True)
    parser.add_argument("--set", default="musique", choices=[*study_sets()])
    parser.add_argument("--questions", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    engine = Engine.load(EngineConfig(model=arguments.model, dtype="bfloat16", kv_dtype="exact"))
    results = measure(engine, arguments.data, arguments.set, arguments.questions)
    model = Path(arguments.model).stem
    print(f"{hardware()}\n\n| {model} | tokens | KL | median | minus the CPU's (95 %) | nearer on |")
    print("|---|---|---|---|---|---|", *lines(results), sep="\n")


if __name__ == "__main__":
    main()
