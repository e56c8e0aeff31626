"""Rotary position embedding: fp32 tables of cos and sin, one for each distinct RoPE of a model's layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.spec import LENGTH_DEPENDENT, ModelSpec, original_length, rotated_dim

CosSin = tuple[Tensor, Tensor]
Rope = Mapping[str, Any]
"""Parameters from `families.rope_fields.rope_parameters`, checked."""


class RotaryEmbedding:
    """cos and sin for positions, as transformers computes them: freqs in fp32, both halves equal, times the scaling.

    rope: None for no rotation. If `partial_rotary_factor` rotates only a part of the head, the rest has cos 1 and sin 0
    (`families` orders q and k so that the halves match). `regime(seq_len)` identifies the frequencies of prompts of
    that length: K rotated under one regime is valid in that regime only (dynamic, longrope). All other types have a
    single regime.
    """

    def __init__(self, rope: Rope | None, head_dim: int, max_positions: int, device: torch.device) -> None:
        self.rope, self.head_dim, self.max_positions, self.device = rope, head_dim, max_positions, device
        self.rope_type = "none" if rope is None else str(rope["rope_type"])
        self._tables: dict[int, CosSin] = {}
        self.original_max = max_positions if rope is None else original_length(rope, max_positions)
        self._frequencies(1)  # report bad parameters here instead of at the first prompt
        # if a process's first cosines are computed by two threads at once, MKL's may be wrong by 1e-4
        torch.ones(1).cos()

    def regime(self, seq_len: int) -> int:
        """Return 0 for short prompts and types that ignore the length, else an id of the frequencies."""
        if self.rope_type not in LENGTH_DEPENDENT or seq_len <= self.original_max:
            return 0
        return seq_len if self.rope_type == "dynamic" else 1

    def table(self, seq_len: int) -> CosSin:
        """Return cos, sin [at least seq_len, head_dim] fp32 of every position, on the device."""
        regime = self.regime(seq_len)
        table = self._tables.get(regime)
        if table is None or table[0].shape[0] < seq_len:
            size = max(1024, 1 << (seq_len - 1).bit_length())
            table = self.at(torch.arange(size), seq_len)
            # keep at most one table of dynamic frequencies
            self._tables = {k: v for k, v in self._tables.items() if k == 0}
            self._tables[regime] = table
        return table

    def at(self, positions: Tensor, seq_len: int) -> CosSin:
        """Return cos, sin of positions [num_rows], without a table."""
        inv_freq, scaling = self._frequencies(seq_len if self.regime(seq_len) else 1)
        freqs = positions.float().cpu()[:, None] * inv_freq[None]
        cos, sin = freqs.cos() * scaling, freqs.sin() * scaling
        rest = self.head_dim // 2 - len(inv_freq)
        if rest:
            cos, sin = torch.nn.functional.pad(cos, (0, rest), value=1.0), torch.nn.functional.pad(sin, (0, rest))
        return torch.cat((cos, cos), -1).to(self.device), torch.cat((sin, sin), -1).to(self.device)

    def _frequencies(self, seq_len: int) -> tuple[Tensor, float]:
        """Return inv_freq [at most head_dim / 2] fp32 and the factor on cos and sin."""
        if self.rope is None:
            return torch.empty(0), 1.0
        try:
            width = rotated_dim(self.rope, self.head_dim)
            inv_freq, scaling = inverse_frequencies(self.rope, width, self.max_positions, seq_len)
        except (ArithmeticError, ValueError) as error:
            raise UsageError(
                f"RoPE of type {self.rope_type!r} cannot be computed from config.json: {error}", "check config.json"
            ) from error
        if not bool(inv_freq.isfinite().all()) or not math.isfinite(scaling):
            raise UsageError(f"RoPE of type {self.rope_type!r} is infinite as config.json has it", "check config.json")
        return inv_freq, scaling


class LayerRotations:
    """The distinct RoPEs and head sizes of a model, usually one. `of_layer[i]` is the index for layer i; per-RoPE
    values are in the order of these indexes."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        of_layers = [(spec.rope_of(layer), spec.heads_of(layer)[1]) for layer in range(spec.num_layers)]
        different: list[tuple[Rope | None, int]] = []
        for rope in of_layers:
            if rope not in different:
                different.append(rope)
        self.of_layer = tuple(different.index(rope) for rope in of_layers)
        self._each = [RotaryEmbedding(r, dim, spec.max_position_embeddings, device) for r, dim in different]
        self.switches_at = spec.rope_switches_at

    def regime(self, seq_len: int) -> int:
        """Return the id of the frequencies for prompts of this length, over all layers; 0 for short prompts."""
        return max(rope.regime(seq_len) for rope in self._each)

    def cos_sin(self, positions: Tensor, seq_len: int) -> tuple[CosSin, ...]:
        """Return cos, sin [num_rows, head_dim] fp32 at positions [num_rows] of a prompt with final length seq_len."""
        return rows_of_tables(self.tables(seq_len), positions)

    def at(self, positions: Tensor, seq_len: int) -> tuple[CosSin, ...]:
        """Return `cos_sin` of a few distant positions without a table."""
        return tuple(rope.at(positions, seq_len) for rope in self._each)

    def tables(self, seq_len: int) -> tuple[CosSin, ...]:
        """Return cos, sin [at least seq_len, head_dim] fp32 of every position."""
        return tuple(rope.table(seq_len) for rope in self._each)


def rows_of_tables(tables: tuple[CosSin, ...], positions: Tensor) -> tuple[CosSin, ...]:
    """Return the rows of each table at positions [num_rows] int64."""
    return tuple((cos.index_select(0, positions), sin.index_select(0, positions)) for cos, sin in tables)


def inverse_frequencies(rope: Rope, head_dim: int, max_positions: int, seq_len: int) -> tuple[Tensor, float]:
    """Return frequencies [head_dim / 2] fp32, and the factor on cos and sin, for a prompt of seq_len tokens.
    max_positions: the model's `max_position_embeddings`. Raises ArithmeticError or ValueError if the parameters have no
    solution.

    Equal to transformers' ROPE_INIT_FUNCTIONS (a test compares them), but written here because importing transformers
    takes as long as answering a short question.
    """
    kind, theta = rope["rope_type"], rope["rope_theta"]
    if kind == "dynamic":  # NTK: the base grows with the length beyond the trained one
        growth = rope["factor"] * max(seq_len, max_positions) / max_positions - (rope["factor"] - 1)
        theta = theta * growth ** (head_dim / (head_dim - 2))
    plain: Tensor = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if kind == "linear":
        return plain / rope["factor"], 1.0
    if kind == "llama3":
        return _llama3(rope, plain), 1.0
    if kind == "proportional":  # the last frequencies are 0: those channels hold no position
        plain[int(rope.get("partial_rotary_factor", 1.0) * head_dim // 2) :] = 0
        return plain / (rope.get("factor") or 1.0), 1.0
    if kind == "yarn":
        return _yarn(rope, plain, max_positions)
    if kind == "longrope":
        return _longrope(rope, plain, max_positions, seq_len)
    return plain, 1.0


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Divide slow dimensions (few turns over the original length) by the factor, keep fast ones; ramp between."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] / (2 * math.pi / plain)
    kept = (turns - low) / (high - low)  # share of the unscaled frequency
    return torch.where(
        turns < low,
        plain / rope["factor"],
        torch.where(turns > high, plain, (1 - kept) * plain / rope["factor"] + kept * plain),
    )


def _yarn(rope: Rope, plain: Tensor, max_positions: int) -> tuple[Tensor, float]:
    """Interpolate as `_llama3`, with a ramp over dimensions, and scale attention (arXiv 2309.00071)."""
    original, dim = rope["original_max_position_embeddings"], 2 * plain.shape[0]
    factor = rope["factor"] or max_positions / original

    def dimension(turns: float) -> float:
        """Return the dimension that makes this many turns over the original length."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    scaled = ramp.clamp(0, 1)
    scaling = rope.get("attention_factor")
    if scaling is None:
        over, under = rope.get("mscale"), rope.get("mscale_all_dim")
        scaling = _sharper(factor, over) / _sharper(factor, under) if over and under else _sharper(factor, 1.0)
    return plain / factor * scaled + plain * (1 - scaled), float(scaling)


def _sharper(factor: float, share: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0


def _longrope(rope: Rope, plain: Tensor, max_positions: int, seq_len: int) -> tuple[Tensor, float]:
    """Scale each pair of dimensions by its own factor, by the prompt's length (LongRoPE, arXiv 2402.13753)."""
    original = rope["original_max_position_embeddings"]
    factors = torch.tensor(rope["long_factor" if seq_len > original else "short_factor"], dtype=torch.float32)
    factor, scaling = rope.get("factor") or max_positions / original, rope.get("attention_factor")
    if scaling is None:
        scaling = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return plain / factors, float(scaling)
