"""Results of kernels that the torch backend does not have, in plain torch on CPU tensors."""

from __future__ import annotations

import torch
from cacheblend_kernels.interface import AttentionMetadata, AttentionParams, LayerCache, Regressed, RegressionPrior
from torch import Tensor

MAX_FLOAT8 = 448.0


def attention_peaks(
    q: Tensor,
    positions: Tensor,
    cache: LayerCache,
    meta: AttentionMetadata,
    params: AttentionParams,
    peaks: Tensor,
) -> None:
    """`KernelBackend.attention_peaks`."""
    peaks, rows = peaks[: int(meta.kv_lens[0])], positions >= 0
    q, positions = q[rows], positions[rows]
    if not len(q):
        return
    keys, size = torch.arange(len(peaks)), cache.k.shape[1]
    slots = meta.block_table[0].long()[keys // size] * size + keys % size
    k = _pool(cache.k, cache.k_scale)[slots].repeat_interleave(q.shape[1] // cache.k.shape[2], 1)
    logits = torch.einsum("rhd,khd->hrk", q.float(), k) * params.scale
    if params.soft_cap is not None:
        logits = params.soft_cap * torch.tanh(logits / params.soft_cap)
    apart = positions[:, None] - keys
    hidden = apart < 0
    if params.sliding_window is not None:
        hidden |= apart >= params.sliding_window
    logits = logits.masked_fill(hidden, -torch.inf)
    if params.sinks is not None:
        logits = torch.cat((logits, params.sinks[:, None, None].expand(-1, len(q), 1)), -1)
    weights = torch.softmax(logits, -1)[..., : len(peaks)]
    torch.maximum(peaks, weights.flatten(0, 1).amax(0), out=peaks)


def correct_stale(
    k: Tensor,
    v: Tensor,
    cache: LayerCache,
    rows: Regressed,
    rotation: tuple[Tensor, Tensor],
    prior: RegressionPrior,
    damped: bool,
) -> None:
    """`KernelBackend.correct_stale`: chunk by chunk, with a covariance matrix and its inverse."""
    starts, known_starts = rows.starts.tolist(), rows.known_starts.tolist()
    every, known = (x[:n] for x, n in ((rows.slots, starts[-1]), (rows.known.long(), known_starts[-1])))
    k, v = (x[rows.fresh[: len(known)]] for x in (k, v))
    cos, sin = (part[: len(every), None] for part in rotation)
    square = cos.square() + sin.square()  # of RoPE's attention factor, else 1
    rotated, old_v = (_pool(c, s)[every] for c, s in ((cache.k, cache.k_scale), (cache.v, cache.v_scale)))
    old_k = _rotated(rotated, cos / square, -sin / square)
    old = torch.stack((old_k.flatten(1), old_v.flatten(1)), 1)  # [num_rows, K and V, width]
    change = torch.stack((k.float().flatten(1), v.float().flatten(1)), 1) - old[known]
    sizes = change.square().sum((1, 2))
    for chunk in range(len(starts) - 1):
        of_known, of_rows = (slice(at[chunk], at[chunk + 1]) for at in (known_starts, starts))
        own = known[of_known] - of_rows.start
        if not len(own):
            continue
        points = old[of_rows] - old[of_rows].mean(0)
        points = points / points.square().sum(-1).mean(0).clamp_min(1e-30).sqrt()[:, None]
        distance = (points[own][:, None] - points[None]).square().sum((2, 3))  # [known, rows of the chunk]
        offset = torch.arange(len(points))
        apart = (own[:, None] - offset).abs()
        near = sum(torch.exp(-apart / length) for length in prior.lengths)
        covariance = torch.exp(-distance / 2) + prior.of_chunk + prior.of_near * near
        size = sizes[of_known]
        noise = prior.noise * (size / size.mean().clamp_min(1e-30)).clamp_min(prior.least_noise)
        wanted = change[of_known].clone()
        wanted[:, 0] -= (1 - prior.common) * change[: of_known.stop, 0].mean(0)
        weights = torch.linalg.solve(covariance[:, own] + torch.diag(noise), wanted.flatten(1))
        moved = (covariance.T @ weights).view_as(points)
        if damped:
            norm = old[of_rows][:, 1].norm(dim=-1)
            moved[:, 1] *= (norm / norm.mean().clamp_min(1e-30)).clamp_max(1)[:, None]
        new = (old[of_rows] + moved).view(len(points), 2, *k.shape[1:])
        stale = ~torch.isin(offset, own)
        slots = every[of_rows][stale]
        _write(cache.k, cache.k_scale, slots, _rotated(new[:, 0], cos[of_rows], sin[of_rows])[stale])
        _write(cache.v, cache.v_scale, slots, new[:, 1][stale])


def _pool(held: Tensor, scale: Tensor | None) -> Tensor:
    """Return a pool's values, fp32 [num_slots, num_kv_heads, head_dim]."""
    values = held.flatten(0, 1).float()
    return values if scale is None else values * scale[:, None]


def _write(held: Tensor, scale: Tensor | None, slots: Tensor, values: Tensor) -> None:
    flat = held.flatten(0, 1)
    if scale is None:
        flat[slots] = values.to(held.dtype)
    else:
        codes = (values / scale[:, None]).clamp(-MAX_FLOAT8, MAX_FLOAT8).to(held.dtype)
        flat.view(torch.uint8)[slots] = codes.view(torch.uint8)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin
