"""RoPE's frequencies beside transformers' initialisers, over parameters of every kind."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from cacheblend_cli.model.families.rope_fields import NEEDED, rope_parameters
from cacheblend_cli.model.rope import RotaryEmbedding, inverse_frequencies

FACTOR = st.floats(1, 64) | st.integers(1, 64)
LENGTH = st.integers(16, 8192)


def parameters(kind: str, head_dim: int) -> st.SearchStrategy[dict[str, Any]]:
    seeds = st.integers(0, 1 << 32)  # and not a list of floats: drawing one by one takes longer than all the rest
    factors = seeds.map(lambda seed: [random.Random(seed + i).uniform(0.5, 64) for i in range(head_dim // 2)])
    turns = st.sampled_from([1.0, 2.0, 4.0])
    optional: dict[str, st.SearchStrategy[Any]] = {
        "yarn": {
            "original_max_position_embeddings": LENGTH, "attention_factor": st.floats(0.5, 2) | st.none(),
            "beta_fast": st.floats(8, 64), "beta_slow": st.floats(0.5, 4) | st.just(0), "truncate": st.booleans(),
            "mscale": st.floats(0.1, 2) | st.just(0), "mscale_all_dim": st.floats(0.1, 2),
        },
        "longrope": {"factor": FACTOR, "original_max_position_embeddings": LENGTH, "attention_factor": st.floats(0.5, 2)},
        "llama3": {"original_max_position_embeddings": LENGTH},
        "proportional": {"partial_rotary_factor": st.floats(0.1, 1), "factor": FACTOR},
    }.get(kind, {})  # fmt: skip
    needed: dict[str, st.SearchStrategy[Any]] = {
        "linear": {"factor": FACTOR},
        "dynamic": {"factor": FACTOR},
        "yarn": {"factor": FACTOR | st.none()},
        "longrope": {"short_factor": factors, "long_factor": factors},
        "llama3": {"factor": FACTOR, "low_freq_factor": turns, "high_freq_factor": turns.map(lambda t: 4 * t)},
        "proportional": {},
    }[kind]
    theta = st.sampled_from([10000.0, 500000, 1e6, 100.0])
    return st.fixed_dictionaries({"rope_type": st.just(kind), "rope_theta": theta, **needed}, optional=optional)


@pytest.mark.parametrize("kind", sorted(set(NEEDED) - {"default"}))
@pytest.mark.parametrize("head_dim", [8, 128])
def test_frequencies_equal_transformers(kind: str, head_dim: int) -> None:
    @given(parameters(kind, head_dim), LENGTH, LENGTH)
    @settings(max_examples=60, deadline=None)
    def compare(rope: dict[str, Any], max_positions: int, seq_len: int) -> None:
        config = LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            max_position_embeddings=max_positions,
            rope_parameters=dict(rope),
        )
        expected, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=seq_len)
        read = rope_parameters({"rope_parameters": rope}, max_positions, head_dim)
        assert read == config.rope_parameters
        ours, own_scaling = inverse_frequencies(read, head_dim, max_positions, seq_len)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=0)
        assert own_scaling == pytest.approx(scaling, rel=1e-12)

    compare()


def test_the_plain_type_is_llamas() -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=64, num_attention_heads=1, rope_theta=500000.0)
    ours, scaling = inverse_frequencies({"rope_type": "default", "rope_theta": 500000.0}, 64, 2048, 1)
    assert torch.equal(ours, LlamaRotaryEmbedding(config).inv_freq)
    assert scaling == 1.0


class Cosines(TorchDispatchMode):
    """Records how many cosines are computed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = list[int]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "cos" in str(function):
            self.counts.append(args[0].numel())
        return function(*args, **kwargs or {})


def test_the_first_cosine_is_computed_by_one_thread() -> None:
    """Two threads that compute a process's first cosines at once may get wrong ones (MKL): torch divides 32,769."""
    with Cosines() as found:
        rope = RotaryEmbedding({"rope_type": "default", "rope_theta": 10000.0}, 64, 4096, torch.device("cpu"))
        rope.table(4096)
    assert found.counts[0] <= 32768 < found.counts[-1]
