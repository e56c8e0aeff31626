"""Calibration of a float8 pool: the scales of K and V per head, from one short prefill.

e4m3 (arXiv 2209.05433) has the same relative precision over seventeen binades, so the scale need not be tight, only
large enough: HEADROOM times the largest value seen almost never saturates, and costs no precision above 1/7000 of that
value. The tokens are the prompt's prefix and a sample of the vocabulary. So the scales depend only on model and
template, and an answer does not depend on earlier questions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cacheblend_cli.kv.forward import FreshKV, KVOnly, finish, layer_by_layer
from cacheblend_cli.kv.pool import upload
from cacheblend_cli.kv.rows import Rows, rows_alone
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.model.kv_scales import KVScales

SAMPLE = 256
HEADROOM = 4.0
LARGEST = 448.0  # largest float8_e4m3fn


@torch.inference_mode()
def calibrate(decoder: Decoder, prefix_ids: Sequence[int], block_size: int) -> KVScales:
    """Compute the scales for this decoder. prefix_ids: the start of every prompt. Takes a prefill of at most SAMPLE
    tokens."""
    ids = _sample(prefix_ids, decoder.spec.vocab_size, min(SAMPLE, decoder.spec.max_context))
    rows = rows_alone(decoder, len(ids), block_size)
    sizes = _Sizes(decoder, rows)
    finish(layer_by_layer(decoder, rows, upload(ids, decoder.device), sizes))
    return KVScales(tuple(sizes.k_scales), tuple(sizes.v_scales))


class _Sizes(KVOnly):
    def __init__(self, decoder: Decoder, rows: Rows) -> None:
        super().__init__(decoder, rows)
        self.k_scales: list[Tensor] = []
        self.v_scales: list[Tensor] = []

    def fresh(self, fresh: FreshKV) -> None:
        k, half = fresh.k, fresh.k.shape[-1] // 2
        turned = torch.hypot(k[..., :half].float(), k[..., half:].float())  # the maximum over all rotations
        cos, sin = fresh.rows.cos_sin(fresh.layer)
        stretch = (cos.square() + sin.square()).max().sqrt()  # not 1 under YaRN and LongRoPE
        self.k_scales.append(_scale(turned * stretch))
        self.v_scales.append(_scale(fresh.v.float().abs()))


def _scale(size: Tensor) -> Tensor:
    """Return scales [num_kv_heads]. size: [num_rows, num_kv_heads, n] fp32, not negative."""
    return size.amax(dim=(0, 2)).clamp_min(1e-6) * (HEADROOM / LARGEST)


def _sample(prefix_ids: Sequence[int], vocab_size: int, count: int) -> list[int]:
    """Return the start of every prompt, then tokens spread over the vocabulary."""
    begin = list(prefix_ids)[: count // 2]
    rest = count - len(begin)
    return begin + [i * vocab_size // rest for i in range(rest)]
