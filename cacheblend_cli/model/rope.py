"""Rotary position embedding: frequencies from transformers' RoPE initialisers, tables of cos and sin in fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cacheblend_cli.errors import UsageError
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
        self._inv_freq: dict[int, tuple[Tensor, float]] = {}
        self._config: Any = None
        self.original_max = int(
            spec.rope.get("original_max_position_embeddings") or spec.max_position_embeddings
            if self.rope_type == "longrope"
            else spec.max_position_embeddings
        )
        rotary_dim = 2 * self._frequencies(1)[0].shape[0]
        if rotary_dim != spec.head_dim:
            raise UsageError(
                f"RoPE over {rotary_dim} of {spec.head_dim} head dimensions (partial_rotary_factor)",
                "only models that rotate the whole head are known",
            )

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
        if self.rope_type == "default":
            dim = self.spec.head_dim
            exponent = torch.arange(0, dim, 2, dtype=torch.float) / dim
            return 1.0 / (float(self.spec.rope["rope_theta"]) ** exponent), 1.0
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        length = seq_len if self.rope_type in LENGTH_DEPENDENT else None
        try:
            if self._config is None:
                self._config = _transformers_config(self.spec)  # which checks the parameters too
            inv_freq, scaling = ROPE_INIT_FUNCTIONS[self.rope_type](self._config, torch.device("cpu"), seq_len=length)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"rope_parameters of type {self.rope_type!r} are incomplete: {error}", "check config.json"
            ) from error
        return inv_freq.float(), float(scaling)


def _transformers_config(spec: ModelSpec) -> Any:
    from transformers import AutoConfig

    config = dict(spec.config)
    model_type = config.pop("model_type", None) or spec.architecture.removesuffix("ForCausalLM").lower()
    config["rope_parameters"] = dict(spec.rope)
    config.pop("rope_scaling", None)
    config["head_dim"] = spec.head_dim
    return AutoConfig.for_model(model_type, **config)
