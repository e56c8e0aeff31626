"""The attention that is reported of each chunk is the model's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cacheblend_kernels import AttentionParams
from cacheblend_store import ChunkStore
from checkpoints import WORDS, write_checkpoint
from transformers import AutoModelForCausalLM

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.features.attention_shares import EVERY
from cacheblend_cli.engine.worker.attention import _weights
from cacheblend_cli.kv.pool import KVPool
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams


@pytest.mark.parametrize("family", ["qwen2", "starcoder2"])
def test_shares_are_those_of_transformers_attention(family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", family)
    (tmp_path / "a.md").write_text(" ".join(WORDS[:12]))
    (tmp_path / "b.md").write_text(" ".join(WORDS[5:24]))
    engine = Engine.load(EngineConfig(model=str(tmp_path / "model"), device="cpu", dtype="float32"))
    with ChunkStore.open(tmp_path / "store", mode="write") as store:
        paths = [str(tmp_path / name) for name in ("a.md", "b.md")]
        engine.precompute(store, paths, PrecomputeOptions(chunk_tokens=64), lambda event: None)
        keys = [m.key for m in store.chunks()]
        sampling = SamplingParams(max_tokens=EVERY + 3, ignore_eos=True)
        answer = engine.run_alone(store, AskRequest("who?", keys, BlendParams(mode="full"), sampling))
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager", dtype=torch.float32)
    ids = [*answer.prompt_ids, *answer.generated_ids]
    with torch.inference_mode():
        layers = hf(torch.tensor([ids]), output_attentions=True).attentions
    count = len(layers)
    looks = torch.zeros(len(ids))
    for step in range(0, len(answer.generated_ids) - 1, EVERY):
        looks += layers[count // 2][0, :, answer.prompt_tokens + step].mean(0)
    found = torch.stack([looks[c.start : c.start + c.tokens].sum() for c in answer.chunks])
    assert [c.attention for c in answer.chunks] == pytest.approx((found / found.sum()).tolist(), abs=1e-3)


def test_a_head_that_looks_at_its_sink_looks_at_no_chunk() -> None:
    spec = SimpleNamespace(kv_shapes=((2, 4),), num_kv_layers=1, num_layers=1, kv_layer=lambda layer: layer)
    sequence = KVPool(spec, 1, 16, torch.float32, torch.device("cpu")).new_sequence(2)  # type: ignore[arg-type]
    keys = sequence.pool.layers[0].k[0, :2]
    keys.zero_()
    keys[0, 0], keys[1, 1] = 20.0, 20.0  # the first head looks at position 0, the second at 1
    layer = SimpleNamespace(
        index=0, attention=AttentionParams(1.0, sinks=torch.tensor([200.0, -200.0])), to_keys=lambda q: q
    )
    found = _weights(layer, torch.ones(2, 4), sequence, 2)  # type: ignore[arg-type]
    torch.testing.assert_close(found, torch.tensor([0.0, 0.5]))
