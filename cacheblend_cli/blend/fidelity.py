"""Divergence of a prompt's KV from a full prefill of the same ids, measured over an answer.

The answer is full prefill's own: its tokens are fed to both (teacher forcing), and the distributions are compared
position by position, so that one early disagreement does not make the rest incomparable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from cacheblend_cli.kv.forward import Steps, forward
from cacheblend_cli.kv.pool import PagedSequence
from cacheblend_cli.kv.rows import rows_of
from cacheblend_cli.model.decoder import Decoder


@dataclass(frozen=True)
class Divergence:
    """Divergence from a full prefill, one entry per answer token."""

    kl: tuple[float, ...]  # KL(full || ours) in nats
    top1: tuple[bool, ...]  # whether the most likely tokens are the same

    @property
    def mean_kl(self) -> float:
        return sum(self.kl) / len(self.kl) if self.kl else 0.0

    @property
    def first_difference(self) -> int | None:
        """First position at which greedy decoding differs from full prefill's answer, None if there is none."""
        return self.top1.index(False) if False in self.top1 else None


@torch.inference_mode()
def teacher_forced(
    decoder: Decoder,
    sequence: PagedSequence,
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    steps: Steps | None = None,
) -> Tensor:
    """Return the logits that predict each token of an answer after the prompt, fp32 [len(answer_ids), vocab_size].

    Computes the prompt's last row again and a row for every answer token but the last, in one pass: the sequence needs
    room for len(prompt_ids) + len(answer_ids) - 1 positions, and their KV is overwritten. Where the RoPE frequencies
    depend on the length, one pass for each set of frequencies, as decoding would have them.
    """
    start = len(prompt_ids) - 1
    ids = [prompt_ids[-1], *answer_ids[:-1]]
    found = []
    for _, run in groupby(range(start, start + len(answer_ids)), key=lambda p: decoder.rope.regime(p + 1)):
        places = list(run)
        positions = torch.tensor(places, device=decoder.device)
        rows = rows_of(decoder, sequence, positions, kv_len=places[-1] + 1, rope_len=places[-1] + 1)
        token_ids = torch.tensor(ids[places[0] - start : places[-1] + 1 - start], device=decoder.device)
        found.append(forward(decoder, rows, token_ids, steps))
    return torch.cat(found)


def log_distribution(logits: Tensor) -> Tensor:
    """Return log-probabilities in fp64, shaped like the logits [num_positions, vocab_size]; on the CPU if the device
    has no fp64."""
    return torch.log_softmax((logits.cpu() if logits.is_mps else logits).double(), -1)


def divergence(reference: Tensor, ours: Tensor) -> Divergence:
    """Compare log-probabilities [num_positions, vocab_size] position by position."""
    kl = (reference.exp() * (reference - ours)).sum(-1).clamp_min(0.0)
    same = reference.argmax(-1) == ours.argmax(-1)
    return Divergence(tuple(kl.tolist()), tuple(same.tolist()))
