"""The whole path with `--attention-backend triton`: the same answer as with torch, from the store to the last token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cacheblend_store import ChunkStore
from checkpoints import WORDS, write_checkpoint
from decoding import decode_one_token

from cacheblend_cli.collect.precompute import PrecomputeOptions
from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.measured_prefill import prefill
from cacheblend_cli.engine.request.resolve import resolve
from cacheblend_cli.kv.calibration import calibrate
from cacheblend_cli.model.kv_scales import KVScales
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

BLEND = BlendParams(ratio=0.3)
GREEDY = SamplingParams(max_tokens=2, ignore_eos=True)
SHALLOW = {"num_hidden_layers": 2}
SHAPES = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
FORMS = {"llama": ("llama-gqa", False), "window": ("mistral-window", False), "float8 pool": ("llama-gqa", True),
         "shapes": ("gemma4", False)}  # fmt: skip


class Setup:
    """One random model under two backends, and a store of three chunks."""

    def __init__(self, root: Path, family: str, float8: bool, device: torch.device) -> None:
        write_checkpoint(root / "model", family, **(SHAPES if family == "gemma4" else SHALLOW))
        shared = {"model": str(root / "model"), "block_size": 16, "dtype": "float32", "prompt": "{chunks}{question}"}
        self.torch = Engine.load(EngineConfig(device="cpu", attention_backend="torch", **shared))  # type: ignore[arg-type]
        self.triton = Engine.load(EngineConfig(device=device.type, attention_backend="triton", **shared))  # type: ignore[arg-type]
        if float8:
            scales = calibrate(self.torch.model.decoder, self.torch.runtime.template.prefix_ids, 16)
            self.torch.model.decoder.kv_scales = scales
            self.triton.model.decoder.kv_scales = KVScales(
                *(tuple(s.to(device) for s in part) for part in (scales.k, scales.v))
            )
        (root / "a.md").write_text("\n\n".join(" ".join(WORDS[p : p + 3]) + f" {p}." for p in range(3)) + "\n")
        self.store = ChunkStore.open(root / "store", mode="write")
        self.torch.precompute(self.store, [str(root / "a.md")], PrecomputeOptions(chunk_tokens=8), lambda event: None)
        self.keys = [m.key for m in sorted(self.store.chunks(), key=lambda m: m.index)][2::-1]

    def logits(self, engine: Engine) -> torch.Tensor:
        """fp32 logits of every row of the question and of a token decoded after it, on the CPU."""
        request = resolve(engine.runtime, self.store, AskRequest("?", self.keys, BLEND, GREEDY))
        decoder = engine.model.decoder
        done = prefill(engine.runtime, request, headroom=1, output_positions=lambda plan: torch.arange(
                plan.segments[-1].start, plan.num_tokens, device=decoder.device
            ))  # fmt: skip
        assert done.result.loader.num_bytes > 0
        assert len(done.result.chosen) > 0
        length = done.plan.num_tokens
        with torch.inference_mode():
            decoded = decode_one_token(decoder, done.pool, done.sequence, 40, length)
        return torch.cat((done.result.logits, decoded[None])).cpu()


@pytest.fixture(scope="module", params=[name for name in FORMS if name != "llama"])
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    import triton

    device = torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")
    setup = Setup(tmp_path_factory.mktemp("engine"), *FORMS[request.param], device)
    yield setup
    setup.store.close()


def test_blended_prefill_and_decode_are_those_of_torch(setup: Setup) -> None:
    ours, reference = (setup.logits(engine) for engine in (setup.triton, setup.torch))
    float8 = setup.torch.model.decoder.kv_scales is not None  # whose codes a last bit of K and V can turn
    assert (ours - reference).abs().max() <= (3e-2 if float8 else 1e-4)
    assert reference.abs().max() > 0.1


@pytest.mark.parametrize("setup", ["llama"], indirect=True)
def test_the_answer_is_that_of_torch(setup: Setup) -> None:
    ours, reference = (
        engine.run_alone(setup.store, AskRequest("?", setup.keys, BLEND, GREEDY))
        for engine in (setup.triton, setup.torch)
    )
    assert ours.generated_ids == reference.generated_ids
    assert ours.recomputed_tokens == reference.recomputed_tokens > 0
    assert [c.recomputed for c in ours.chunks] == [c.recomputed for c in reference.chunks]
