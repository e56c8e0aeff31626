"""Rotary position embedding: tables of cos and sin in fp32."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.rope_frequencies import inverse_frequencies
from cacheblend_cli.model.spec import ModelSpec

LENGTH_DEPENDENT = ("dynamic", "longrope")


class RotaryEmbedding:
    """cos and sin for positions, as transformers computes them: freqs in fp32, both halves equal, times the scaling.

    `regime(seq_len)` names the set of frequencies a prompt of that length gets: K rotated under one regime is
    right in that regime only (dynamic, longrope). For every other type there is a single regime.
    """

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self.rope_type = str(spec.rope["rope_type"])
        self.spec, self.device = spec, device
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}
        longrope = self.rope_type == "longrope"
        self.original_max = int(
            spec.rope["original_max_position_embeddings"] if longrope else spec.max_position_embeddings
        )
        self._frequencies(1)  # what is wrong with the parameters shows here, and not at the first prompt

    def regime(self, seq_len: int) -> int:
        """0 for short prompts and for types that do not depend on the length; else what tells the frequencies apart."""
        if self.rope_type not in LENGTH_DEPENDENT or seq_len <= self.original_max:
            return 0
        return seq_len if self.rope_type == "dynamic" else 1

    def cos_sin(self, positions: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
        """cos, sin [num_rows, head_dim] fp32 for positions [num_rows] in a prompt whose final length is seq_len."""
        cos, sin = self.table(seq_len)
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def table(self, seq_len: int) -> tuple[Tensor, Tensor]:
        """cos, sin [at least seq_len, head_dim] fp32 of every position, on the device."""
        regime = self.regime(seq_len)
        table = self._tables.get(regime)
        if table is None or table[0].shape[0] < seq_len:
            size = max(1024, 1 << (seq_len - 1).bit_length())
            inv_freq, scaling = self._frequencies(seq_len if regime else 1)
            freqs = torch.arange(size, dtype=torch.float32)[:, None] * inv_freq[None]
            both = torch.cat((freqs, freqs), dim=-1)
            table = ((both.cos() * scaling).to(self.device), (both.sin() * scaling).to(self.device))
            self._tables = {k: v for k, v in self._tables.items() if k == 0}  # dynamic regimes do not pile up
            self._tables[regime] = table
        return table

    def _frequencies(self, seq_len: int) -> tuple[Tensor, float]:
        """inv_freq [head_dim / 2] fp32 and the factor on cos and sin."""
        spec = self.spec
        try:
            inv_freq, scaling = inverse_frequencies(spec.rope, spec.head_dim, spec.max_position_embeddings, seq_len)
        except (ArithmeticError, ValueError) as error:
            raise UsageError(
                f"RoPE of type {self.rope_type!r} cannot be computed from config.json: {error}", "check config.json"
            ) from error
        if not bool(inv_freq.isfinite().all()) or not math.isfinite(scaling):
            raise UsageError(f"RoPE of type {self.rope_type!r} is infinite as config.json has it", "check config.json")
        return inv_freq, scaling
