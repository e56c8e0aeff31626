"""Rotary position embedding: tables of cos and sin in fp32, one for each RoPE that a model's layers have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.rope_frequencies import inverse_frequencies
from cacheblend_cli.model.spec import ModelSpec

LENGTH_DEPENDENT = ("dynamic", "longrope")

CosSin = tuple[Tensor, Tensor]


class RotaryEmbedding:
    """cos and sin for positions, as transformers computes them: freqs in fp32, both halves equal, times the scaling.

    rope: parameters as `families.rope_fields` gives them; None: nothing is rotated. Where `partial_rotary_factor` turns a
    part of the head only, the rest has cos 1 and sin 0 (`families` has laid out q and k so that the halves match).
    `regime(seq_len)` names the set of frequencies a prompt of that length gets: K rotated under one regime is
    right in that regime only (dynamic, longrope). For every other type there is a single regime.
    """

    def __init__(self, rope: Mapping[str, Any] | None, head_dim: int, max_positions: int, device: torch.device) -> None:
        self.rope, self.head_dim, self.max_positions, self.device = rope, head_dim, max_positions, device
        self.rope_type = "none" if rope is None else str(rope["rope_type"])
        self._tables: dict[int, CosSin] = {}
        original = rope["original_max_position_embeddings"] if self.rope_type == "longrope" and rope else max_positions
        self.original_max = int(original)
        self._frequencies(1)  # what is wrong with the parameters shows here, and not at the first prompt

    def regime(self, seq_len: int) -> int:
        """0 for short prompts and for types that do not depend on the length; else what tells the frequencies apart."""
        if self.rope_type not in LENGTH_DEPENDENT or seq_len <= self.original_max:
            return 0
        return seq_len if self.rope_type == "dynamic" else 1

    def table(self, seq_len: int) -> CosSin:
        """cos, sin [at least seq_len, head_dim] fp32 of every position, on the device."""
        regime = self.regime(seq_len)
        table = self._tables.get(regime)
        if table is None or table[0].shape[0] < seq_len:
            size = max(1024, 1 << (seq_len - 1).bit_length())
            table = self.at(torch.arange(size), seq_len)
            self._tables = {k: v for k, v in self._tables.items() if k == 0}  # dynamic regimes do not pile up
            self._tables[regime] = table
        return table

    def at(self, positions: Tensor, seq_len: int) -> CosSin:
        """The same of some positions [num_rows], computed for them alone."""
        inv_freq, scaling = self._frequencies(seq_len if self.regime(seq_len) else 1)
        freqs = positions.float().cpu()[:, None] * inv_freq[None]
        cos, sin = freqs.cos() * scaling, freqs.sin() * scaling
        rest = self.head_dim // 2 - len(inv_freq)
        if rest:
            cos, sin = torch.nn.functional.pad(cos, (0, rest), value=1.0), torch.nn.functional.pad(sin, (0, rest))
        return torch.cat((cos, cos), -1).to(self.device), torch.cat((sin, sin), -1).to(self.device)

    def _frequencies(self, seq_len: int) -> tuple[Tensor, float]:
        """inv_freq [at most head_dim / 2] fp32 and the factor on cos and sin."""
        if self.rope is None:
            return torch.empty(0), 1.0
        rotated = int(self.head_dim * (self.rope.get("partial_rotary_factor") or 1))
        try:
            inv_freq, scaling = inverse_frequencies(self.rope, rotated, self.max_positions, seq_len)
        except (ArithmeticError, ValueError) as error:
            raise UsageError(
                f"RoPE of type {self.rope_type!r} cannot be computed from config.json: {error}", "check config.json"
            ) from error
        if not bool(inv_freq.isfinite().all()) or not math.isfinite(scaling):
            raise UsageError(f"RoPE of type {self.rope_type!r} is infinite as config.json has it", "check config.json")
        return inv_freq, scaling


class LayerRotations:
    """The different RoPEs of a model, most often one. `of_layer[i]` is the number of layer i's; whatever comes for each of
    them is in the order of these numbers."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        of_layers = [spec.rope_of(layer) for layer in range(spec.num_layers)]
        different: list[Mapping[str, Any] | None] = []
        for rope in of_layers:
            if rope not in different:
                different.append(rope)
        self.of_layer = tuple(different.index(rope) for rope in of_layers)
        self._each = [RotaryEmbedding(r, spec.head_dim, spec.max_position_embeddings, device) for r in different]
        lengths = [r.original_max for r in self._each if r.rope_type in LENGTH_DEPENDENT]
        self.switches_at: int | None = min(lengths, default=None)  # tokens up to which the frequencies are one set

    def regime(self, seq_len: int) -> int:
        """What tells the frequencies of prompts of this length from others, over all layers; 0: of short prompts."""
        return max(rope.regime(seq_len) for rope in self._each)

    def cos_sin(self, positions: Tensor, seq_len: int) -> tuple[CosSin, ...]:
        """cos, sin [num_rows, head_dim] fp32 for positions [num_rows] in a prompt whose final length is seq_len."""
        return rows_of_tables(self.tables(seq_len), positions)

    def at(self, positions: Tensor, seq_len: int) -> tuple[CosSin, ...]:
        """As `cos_sin`, of a few positions far away: no table is made."""
        return tuple(rope.at(positions, seq_len) for rope in self._each)

    def tables(self, seq_len: int) -> tuple[CosSin, ...]:
        """cos, sin [at least seq_len, head_dim] fp32 of every position."""
        return tuple(rope.table(seq_len) for rope in self._each)


def rows_of_tables(tables: tuple[CosSin, ...], positions: Tensor) -> tuple[CosSin, ...]:
    """The rows of each table at positions [num_rows] int64."""
    return tuple((cos.index_select(0, positions), sin.index_select(0, positions)) for cos, sin in tables)
