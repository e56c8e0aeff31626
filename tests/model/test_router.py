"""Routers that choose groups of experts before experts, beside transformers' modules with the same weights."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from cacheblend_cli.model.experts import Router
from cacheblend_cli.model.spec import ExpertsSpec, Routing

COUNT, PER_TOKEN, HIDDEN = 12, 3, 16
SHAPE = {
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "n_routed_experts": COUNT,
    "num_experts_per_tok": PER_TOKEN,
    "routed_scaling_factor": 1.7,
}


def dense(weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """The weight of every expert, 0 of those that were not chosen."""
    return torch.zeros(len(weights), COUNT).scatter_(1, chosen, weights)


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 1), (4, 2), (3, 3)])
@pytest.mark.parametrize("sigmoid", [True, False])
def test_the_router_chooses_as_transformers_does(sigmoid: bool, groups: int, kept: int) -> None:
    torch.manual_seed(0)
    shape = SHAPE | {"n_group": groups, "topk_group": kept}
    theirs = (
        DeepseekV3TopkRouter(DeepseekV3Config(**shape))
        if sigmoid
        else DeepseekV2TopkRouter(DeepseekV2Config(**shape, topk_method="group_limited_greedy"))
    )
    torch.nn.init.normal_(theirs.weight)
    correction = torch.randn(COUNT) if sigmoid else None
    if correction is not None:
        theirs.e_score_correction_bias.copy_(correction)
    experts = ExpertsSpec(COUNT, PER_TOKEN, 8, (0,), normed=sigmoid, routing=Routing(sigmoid, groups, kept, factor=1.7))
    h = torch.randn(40, HIDDEN)
    _, weights, chosen = theirs(h)
    torch.testing.assert_close(
        dense(*Router(experts, theirs.weight.detach(), correction)(h)), dense(weights.detach(), chosen)
    )
