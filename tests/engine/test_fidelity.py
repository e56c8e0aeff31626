"""Teacher forcing and the comparison of distributions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint
from decoding import decode_one_token

from cacheblend_cli.blend.fidelity import divergence, log_distribution, teacher_forced
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.kv.forward import Steps, forward
from cacheblend_cli.kv.pool import KVPool, PagedSequence
from cacheblend_cli.kv.rows import rows_of
from cacheblend_cli.model.decoder import DecoderLayer

LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 20,
    }
}


@pytest.mark.parametrize(("family", "overrides"), [("qwen3", {}), ("mistral-window", {}), ("llama-gqa", LONGROPE)])
def test_teacher_forcing_predicts_what_decoding_predicts(
    tmp_path: Path, family: str, overrides: dict[str, Any]
) -> None:
    """Also where the answer crosses the length at which the RoPE frequencies change (prompt 16, switch at 20)."""
    write_checkpoint(tmp_path / "model", family, seed=1, **overrides)
    engine = Engine.load(EngineConfig(model=str(tmp_path / "model"), device="cpu", dtype="float32"))
    decoder = engine.model.decoder
    prompt, answer = list(range(40, 56)), list(range(80, 89))

    def prefilled() -> tuple[KVPool, PagedSequence, torch.Tensor]:
        pool = KVPool(engine.model.spec, 8, 16, decoder.dtype, decoder.device)
        sequence = pool.new_sequence(40)
        rows = rows_of(decoder, sequence, torch.arange(16), kv_len=16, rope_len=16)
        logits = forward(decoder, rows, torch.tensor(prompt))
        return pool, sequence, logits[-1]

    with torch.inference_mode():
        pool, sequence, first = prefilled()
        stepwise = [first, *(decode_one_token(decoder, pool, sequence, t, 16 + i) for i, t in enumerate(answer[:-1]))]
        pool, sequence, _ = prefilled()
        seen = Seen()
        forced = teacher_forced(decoder, sequence, prompt, answer, seen)
    assert (forced - torch.stack(stepwise)).abs().max() <= 1e-4
    assert {i for i, _ in seen.shapes} == set(range(4))
    assert sum(shape[0] for i, shape in seen.shapes if i == 2) == len(answer)


class Seen(Steps):
    def __init__(self) -> None:
        self.shapes: list[tuple[int, torch.Size]] = []

    def attended(self, layer: DecoderLayer, output: torch.Tensor) -> None:
        self.shapes.append((layer.index, output.shape))


def test_divergence_of_known_distributions() -> None:
    reference = log_distribution(torch.tensor([[0.5, 0.25, 0.25], [0.9, 0.05, 0.05]]).log())
    ours = log_distribution(torch.tensor([[0.25, 0.5, 0.25], [0.9, 0.05, 0.05]]).log() + 3.0)
    found = divergence(reference, ours)
    assert found.kl == pytest.approx((0.25 * math.log(2), 0.0), abs=1e-6)
    assert found.top1 == (False, True)
    assert found.first_difference == 0
    assert divergence(reference, reference).first_difference is None
