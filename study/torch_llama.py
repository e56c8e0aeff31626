"""A Llama in plain torch, differentiable in its inputs, with KV that is passed in and out: for training around a frozen
model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from cacheblend_kernels import RowTable, compiled
from torch import Tensor

from cacheblend_cli.model.families import read_spec
from cacheblend_cli.model.rope import LayerRotations
from cacheblend_cli.model.spec import LENGTH_DEPENDENT, ModelSpec
from cacheblend_cli.model.tokenizer import Tokenizer
from cacheblend_cli.model.weights import load_weights
from cacheblend_cli.prompt.template import split_template
from cacheblend_cli.prompt.wording import Wording

KV = list[tuple[Tensor, Tensor]]
"""K and V of every layer, [batch, num_tokens, num_kv_heads, head_dim]. K is rotated where it is attended to, else
not."""


LONGEST = 1 << 14  # tokens of a prompt


LOADED = {"fused", "renamed", "outer", "other_parts"}
"""What of a spec only says where `load_weights` finds the weights."""


def values(weight: Tensor | RowTable, dtype: torch.dtype) -> Tensor:
    """Return a copy of a weight in memory."""
    if isinstance(weight, Tensor):
        return weight.clone()
    rows = compiled.restore_rows(weight, torch.arange(len(weight)), dtype)
    assert rows is not None
    return rows * weight.factor


def unlike_llama(spec: ModelSpec) -> list[str]:
    """Return what `Frozen` would compute otherwise than the spec says: names of its fields."""
    found = [
        f.name
        for f in fields(spec)
        if f.default is not MISSING and f.name not in LOADED | {"norms"} and getattr(spec, f.name) != f.default
    ]
    plain = {
        "norms": [name for name, _ in spec.norms] == ["attention_in", "mlp_in"],
        "activation": spec.activation == "silu",
        **{name: not getattr(spec, name) for name in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "query_growth")},
        "sliding_windows": not any(spec.sliding_windows),
        "rope": spec.rotated_dim == spec.head_dim and spec.rope["rope_type"] not in LENGTH_DEPENDENT,
    }
    return found + [name for name, is_plain in plain.items() if not is_plain]


class Frozen:
    """A Llama in plain torch on the default device, differentiable in its inputs. Raises ValueError for other
    architectures."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self.spec = spec = read_spec(path)
        if special := unlike_llama(spec):
            raise ValueError(f"{spec.architecture} is not a plain Llama: {', '.join(special)}")
        device = torch.get_default_device()
        found = load_weights(spec, path, dtype, device)
        self.weights = {name: values(weight, dtype) for name, weight in found.items()}
        self.heads, self.kv_heads, self.dim = spec.num_heads, *spec.heads_of(0)
        self.device, self.dtype = device, dtype
        with torch.device("cpu"):
            [tables] = LayerRotations(spec, torch.device("cpu")).tables(min(spec.max_position_embeddings, LONGEST))
        self._cos, self._sin = (table.to(device) for table in tables)
        self.tokenizer = Tokenizer(path, spec.vocab_size)
        ending = self.tokenizer.special("eos_token")
        self.end_id = self.tokenizer.token_id(ending) if ending else None
        self.template = split_template(self.tokenizer, Wording.of(path))

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weights["embed"])

    def norm(self, x: Tensor, name: str) -> Tensor:
        return (
            F.rms_norm(x.float(), x.shape[-1:], eps=self.spec.rms_norm_eps).to(x.dtype) * self.weights[f"{name}.weight"]
        )

    def turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [batch or 1, num_tokens, 1, head_dim] of positions [batch or 1, num_tokens]."""
        return self._cos[positions][:, :, None], self._sin[positions][:, :, None]

    def run(self, x: Tensor, positions: Tensor, past: KV, mask: Tensor) -> tuple[Tensor, KV]:
        """Compute tokens behind others. x: [batch, num_tokens, hidden_size]; positions: [batch or 1, num_tokens]; past:
        rotated, batch or 1; mask: bool [batch or 1, 1, num_tokens, num_past + num_tokens]. Returns the normed output,
        and own K before RoPE and V."""
        batch, count, group = len(x), x.shape[1], self.heads // self.kv_heads
        grouped = mask.repeat(1, 1, group, 1)
        turns = self.turns(positions)
        sizes, own = [self.heads * self.dim, *[self.kv_heads * self.dim] * 2], []
        for i in range(self.spec.num_layers):
            qkv = F.linear(self.norm(x, f"{i}.attention_in"), self.weights[f"{i}.qkv_proj.weight"]).split(sizes, -1)
            q, k, v = (t.unflatten(-1, (-1, self.dim)) for t in qkv)
            own.append((k, v))
            keys, values = (
                torch.cat((old.expand(batch, -1, -1, -1), new), 1).transpose(1, 2)
                for old, new in zip(past[i], (rotated(k, turns), v), strict=True)
            )
            rows = (
                rotated(q, turns).unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4)
            )  # heads of one KV head are rows of it
            out = F.scaled_dot_product_attention(rows.flatten(2, 3), keys, values, attn_mask=grouped)
            out = out.unflatten(2, (group, count)).permute(0, 3, 1, 2, 4)
            x = x + F.linear(out.reshape(batch, count, -1), self.weights[f"{i}.o_proj.weight"])
            gate, up = F.linear(self.norm(x, f"{i}.mlp_in"), self.weights[f"{i}.gate_up_proj.weight"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, self.weights[f"{i}.down_proj.weight"])
        return self.norm(x, "norm"), own

    def behind(self, x: Tensor, past: KV, start: int) -> tuple[Tensor, KV]:
        """`run` at positions from start on, each token seeing all of the past."""
        count, num_past = x.shape[1], past[0][0].shape[1]
        mask = torch.ones(count, num_past + count, dtype=torch.bool).tril(num_past)
        return self.run(x, torch.arange(start, start + count)[None], past, mask[None, None])

    def placed(self, kv: KV, positions: Tensor) -> KV:
        """Rotate K to these positions, [batch or 1, num_tokens]."""
        turns = self.turns(positions)
        return [(rotated(k, turns), v) for k, v in kv]

    def placed_from(self, kv: KV, start: int) -> KV:
        """Rotate K to positions from start on."""
        return self.placed(kv, torch.arange(start, start + kv[0][0].shape[1])[None])

    def log_p(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weights["lm_head"]).float().log_softmax(-1)

    @property
    def no_kv(self) -> KV:
        none = torch.empty(1, 0, self.kv_heads, self.dim, dtype=self.dtype)
        return [(none, none)] * self.spec.num_layers


def rotated(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """x: [batch, num_tokens, heads, head_dim]; turns: of `Frozen.turns`. Computed in fp32."""
    left, right = x.float().chunk(2, -1)
    return (x.float() * turns[0] + torch.cat((-right, left), -1) * turns[1]).to(x.dtype)


def joined(*parts: KV) -> KV:
    """Join along the tokens."""
    return [tuple(torch.cat(pair, 1) for pair in zip(*layer, strict=True)) for layer in zip(*parts, strict=True)]


def expanded(kv: KV, count: int) -> KV:
    """The same for a batch."""
    return [(k.expand(count, -1, -1, -1), v.expand(count, -1, -1, -1)) for k, v in kv]


def flat(kv: KV) -> KV:
    """Chunks one behind another, as a batch of one."""
    return [(k.flatten(0, 1)[None], v.flatten(0, 1)[None]) for k, v in kv]


def left_padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """ids [num_rows, longest] and which of them are real."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + [*row] for row in rows])
    return ids, torch.tensor([[False] * (longest - len(row)) + [True] * len(row) for row in rows])
