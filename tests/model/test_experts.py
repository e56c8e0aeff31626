"""A layer's experts: each row gets the output of its own experts, and no others are read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cacheblend_kernels.torch_backend import TorchBackend
from torch import Tensor

from cacheblend_cli.model import experts
from cacheblend_cli.model.experts import Experts, ExpertsBeside
from cacheblend_cli.model.families import spec_from_config
from cacheblend_cli.model.module_weights import ModuleWeights
from cacheblend_cli.model.spec import ExpertsSpec
from cacheblend_cli.model.weight_map import expected_shapes

COUNT, PER_TOKEN, WIDTH, HIDDEN = 6, 2, 8, 16
SPEC = spec_from_config(
    {"model_type": "gpt_oss", "num_hidden_layers": 1, "hidden_size": HIDDEN, "intermediate_size": WIDTH, "head_dim": 8,
     "num_local_experts": COUNT, "num_experts_per_tok": PER_TOKEN, "vocab_size": 32, "swiglu_limit": 0.5}
)  # fmt: skip


def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {target: shape for _, target, _, shape in expected_shapes(SPEC).values() if target.startswith("0.")}
    return {target.removeprefix("0."): torch.randn(shape) for target, shape in shapes.items()}


def layer(held: dict[str, Tensor], clamped: bool = True) -> Experts:
    assert SPEC.experts is not None
    spec = SPEC.experts if clamped else replace(SPEC.experts, clamped=None)
    return Experts(ModuleWeights(SPEC, dict(held), TorchBackend()), spec)


def row_by_row(held: dict[str, Tensor], h: Tensor, clamped: bool) -> Tensor:
    out = []
    for row in h:
        logits, chosen = F.linear(row, held["router.weight"], held["router.bias"]).topk(PER_TOKEN)
        total = torch.zeros(HIDDEN)
        for share, expert in zip(logits.softmax(-1), chosen.tolist(), strict=True):
            up, down = (
                held[f"experts_{n}.weight"].view(COUNT, -1, c)[expert] for n, c in (("up", HIDDEN), ("down", WIDTH))
            )
            up_bias, down_bias = (held[f"experts_{n}.bias"].view(COUNT, -1)[expert] for n in ("up", "down"))
            gate, value = (up @ row + up_bias).chunk(2)
            if clamped:
                gate = gate.clamp(max=0.5)
                inner = (value.clamp(-0.5, 0.5) + 1) * gate * torch.sigmoid(1.702 * gate)
            else:
                inner = F.silu(gate) * value
            total += share * (down @ inner + down_bias)
        out.append(total)
    return torch.stack(out)


@pytest.mark.parametrize("clamped", [True, False])
@pytest.mark.parametrize("num_rows", [1, 7, 30])
def test_every_row_gets_what_its_experts_make_of_it(
    num_rows: int, clamped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "MOST_ROWS", 16)  # 30 rows take two turns
    held, h = weights(), torch.randn(num_rows, HIDDEN)
    torch.testing.assert_close(layer(held, clamped)(h), row_by_row(held, h, clamped), atol=1e-4, rtol=1e-4)


def test_a_row_reads_its_own_experts_alone() -> None:
    """The other experts' weights are NaN, which must not show in the result."""
    held, h = weights(), torch.randn(1, HIDDEN)
    chosen = F.linear(h, held["router.weight"], held["router.bias"]).topk(PER_TOKEN).indices[0].tolist()
    wanted = row_by_row(held, h, clamped=True)
    for name in ("experts_up", "experts_down"):
        each = held[f"{name}.weight"].view(COUNT, -1)
        each[[e for e in range(COUNT) if e not in chosen]] = torch.nan
    torch.testing.assert_close(layer(held)(h), wanted, atol=1e-4, rtol=1e-4)


def test_experts_beside_the_mlp_are_chosen_by_the_normed_input() -> None:
    """Gemma 4's router norms its input, scales each channel of it, and scales what an expert gives."""
    spec = replace(SPEC, rms_norm_eps=1e-6)
    of_two = ExpertsSpec(count=3, per_token=1, width=WIDTH, layers=(0,), beside=True)
    torch.manual_seed(0)
    held = {
        "router.weight": torch.eye(3, HIDDEN),
        "router_scale": torch.ones(HIDDEN),
        "expert_scale": torch.tensor([1.0, 0.0, 3.0]),
        "experts_up.weight": torch.randn(3 * 2 * WIDTH, HIDDEN),
        "experts_down.weight": torch.randn(3 * HIDDEN, WIDTH),
    }
    held["router_scale"][0] = 0.0
    norms = {"dense_out": lambda x: 2 * x, "experts_in": lambda x: x, "experts_out": lambda x: 5 * x}
    beside = ExpertsBeside(ModuleWeights(spec, dict(held), TorchBackend()), of_two, norms)
    h = torch.zeros(2, HIDDEN)
    h[0, :2], h[1, [0, 2]] = torch.tensor([9.0, 1.0]), torch.tensor([9.0, 1.0])  # channel 0 chooses nothing
    dense = torch.randn(2, HIDDEN)
    out = beside(dense, h, lambda partial: partial)
    torch.testing.assert_close(out[0], 2 * dense[0])
    up, down = held["experts_up.weight"].view(3, -1, HIDDEN)[2], held["experts_down.weight"].view(3, HIDDEN, WIDTH)[2]
    gate, value = (up @ h[1]).chunk(2)
    torch.testing.assert_close(out[1], 2 * dense[1] + 15 * (down @ (F.silu(gate) * value)), atol=1e-4, rtol=1e-4)


def test_a_row_does_not_depend_on_where_others_are_sent() -> None:
    """So wide that a product of one row alone is another than of several, to the bit."""
    hidden, width = 2048, 768
    torch.manual_seed(0)
    held = {
        "router.weight": torch.zeros(2, hidden),
        "experts_up.weight": torch.randn(4 * width, hidden),
        "experts_down.weight": torch.randn(2 * hidden, width),
    }
    held["router.weight"][:, 0] = torch.tensor([-9.0, 9.0])
    of_two = ExpertsSpec(count=2, per_token=1, width=width, layers=(0,))
    spec = replace(SPEC, hidden_size=hidden, activation="silu")
    layer = Experts(ModuleWeights(spec, held, TorchBackend()), of_two)
    h = torch.randn(8, hidden)
    h[:, 0] = torch.tensor([-1.0, 1, 1, 1, -1, -1, -1, -1])  # the first four: one expert gets one row of them
    assert torch.equal(layer(h[:4])[0], layer(h)[0])
