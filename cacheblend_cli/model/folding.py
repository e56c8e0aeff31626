"""What a family computes otherwise and its weights can hold: done once at load, so that no kernel knows of it."""

from __future__ import annotations

from torch import Tensor

from cacheblend_cli.model.spec import ModelSpec


def fold(spec: ModelSpec, weights: dict[str, Tensor]) -> None:
    """Change the weights, in place and in fp32: the offset of the norms' weights, the factor on what layers add, and the
    order of the channels of q and k. K is stored in that order; no product of q and k sees it."""
    order = head_order(spec)
    for name, weight in weights.items():
        part = name.split(".", 1)[-1]
        if spec.norm_offset and _is_norm(part):
            weight.copy_(weight.float() + spec.norm_offset)
        if spec.residual_scale != 1 and part.startswith(("o_proj", "down_proj")):
            weight.copy_(weight.float() * spec.residual_scale)
        if order is None:
            continue
        if part.startswith("qkv_proj"):
            heads = weight[: spec.q_size + spec.kv_size].unflatten(0, (-1, spec.head_dim))
            heads.copy_(heads[:, order])
        elif part in ("q_norm", "k_norm"):
            heads = weight.unflatten(0, (-1, spec.head_dim))
            heads.copy_(heads[:, order])


def head_order(spec: ModelSpec) -> list[int] | None:
    """Which channel of a checkpoint's head stands where in ours; None: all as they are.

    The kernels turn channel i with channel i + half. Where RoPE turns the first channels of a head only, or neighbours with
    each other, the pairs are put there, and what is not turned behind them in either half.
    """
    rotated = spec.rotated_dim
    if rotated == spec.head_dim and not spec.interleaved:
        return None
    turned, rest = list(range(rotated)), list(range(rotated, spec.head_dim))
    step, half = len(rest) // 2, rotated // 2
    first, second = (turned[0::2], turned[1::2]) if spec.interleaved else (turned[:half], turned[half:])
    return [*first, *rest[:step], *second, *rest[step:]]


def _is_norm(part: str) -> bool:
    return part in ("norm.weight", "weight", "q_norm", "k_norm") or part.split(".")[0].endswith(("_in", "_out"))
