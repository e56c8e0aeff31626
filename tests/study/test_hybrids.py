"""The study of hybrids: operators of chunks compose to the state of all tokens, and recomputing everything is a full
prefill."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from study_modules import study_modules


@pytest.fixture
def hybrids() -> Iterator[ModuleType]:
    with study_modules() as load:
        yield load("hybrids")


@torch.inference_mode()
def test_chunks_compose_and_everything_recomputed_is_exact(hybrids: ModuleType) -> None:
    model = hybrids.tiny(["linear_attention", "linear_attention", "full_attention"], seed=0)
    prompt = hybrids.Prompt.drawn(num_chunks=3, num_tokens=10, seed=0)
    _, whole = hybrids.run(model, prompt.ids)
    errors = hybrids.composing(model, prompt, whole)
    assert errors["composed, fp32"] < 1e-5
    assert errors["composed, the convolution beginning anew in each chunk"] > 1e-3
    first, second = hybrids.unrepaired(model, prompt, whole)
    assert first == pytest.approx(0, abs=1e-5)
    assert second > 0.01
    assert all(kl < 1e-9 for _, ratio, kl, _ in hybrids.repaired(model, prompt, [1.0]) if ratio == 1)


@torch.inference_mode()
def test_the_states_are_transformers_own(hybrids: ModuleType) -> None:
    from transformers import DynamicCache

    model = hybrids.tiny(["linear_attention", "full_attention"], seed=1)
    prompt = hybrids.Prompt.drawn(num_chunks=2, num_tokens=10, seed=1)
    cache = DynamicCache(config=model.config)
    model(torch.tensor([prompt.ids]), past_key_values=cache, use_cache=True)
    _, whole = hybrids.run(model, prompt.ids)
    ours = hybrids.final_state(model, whole, len(prompt.ids), torch.float32)
    torch.testing.assert_close(ours, cache.get_recurrent_state(0, state_idx=0)[0], atol=1e-5, rtol=1e-4)
