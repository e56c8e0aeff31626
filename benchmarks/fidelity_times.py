"""Time to the first token of every setting of the fidelity study, as a share of a full prefill's."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cacheblend_store import ChunkStore

from cacheblend_cli.api import Engine
from cacheblend_cli.engine.prefill import prefill
from cacheblend_cli.engine.request import Question, resolve
from cacheblend_cli.evaluation.chunks import SampleChunks
from cacheblend_cli.evaluation.evaluate import FULL
from cacheblend_cli.evaluation.samples import Sample
from cacheblend_cli.evaluation.settings import Setting


def first_tokens(
    engine: Engine, sample: Sample, settings: Sequence[Setting], rounds: int, until: float = float("inf")
) -> dict[str, Any]:
    """One question under each of the settings in turn, round after round after one to warm up: from the known question to the
    first token, stored KV loaded and verified. No round begins past `until` (time.monotonic), but the first is finished.

    Returns full_s: the median of full prefill, seconds; shares: of each label, its median over that; rounds.
    """
    runtime = engine.runtime
    seconds: dict[str, list[float]] = {s.label: [] for s in (FULL, *settings)}
    with (
        tempfile.TemporaryDirectory(prefix="cacheblend-fidelity-") as folder,
        ChunkStore.open(Path(folder) / "store", mode="write") as store,
    ):
        chunks = SampleChunks(engine, store, [sample])
        contexts = list(dict.fromkeys(s.context for s in settings))
        chunks.store([sample], contexts)
        for number in range(rounds + 1):
            if number > 1 and time.monotonic() > until:
                break
            print(f"  first tokens, round {number} of {rounds}", file=sys.stderr, flush=True)
            for setting in (FULL, *settings):
                context = setting.context if setting.reuses else contexts[0]
                start = time.perf_counter()
                request = resolve(runtime, store, Question(sample.question, chunks.keys(sample, context)))
                done = (setting.prefill or prefill)(runtime, replace(request, blend=setting.blend))
                int(done.logits.argmax())
                if number:
                    seconds[setting.label].append(time.perf_counter() - start)
                done.sequence.release()
    median = {label: statistics.median(runs) for label, runs in seconds.items()}
    full = median.pop(FULL.label)
    shares = {label: value / full for label, value in median.items()}
    return {"full_s": full, "shares": shares, "rounds": len(seconds[FULL.label])}
