"""A plain Llama for training: packed questions behind a block mask, and two auxiliary losses whose parts are not
exported."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.demo_model.samples import Batch


@dataclass(frozen=True)
class Shape:
    vocab_size: int
    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


class Attention(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.q_proj = nn.Linear(s.hidden_size, s.num_attention_heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.hidden_size, s.num_key_value_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden_size, s.num_key_value_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.num_attention_heads * s.head_dim, s.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: [batch, length, hidden]; mask: additive [batch, 1, length, length]. Returns the output, rotated q and
        k."""
        batch, length, _ = x.shape
        q, k, v = (
            p(x).view(batch, length, -1, self.s.head_dim).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = self.s.num_attention_heads // self.s.num_key_value_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1)), q, k


class Layer(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(s)
        self.gate_proj = nn.Linear(s.hidden_size, s.intermediate_size, bias=False)
        self.up_proj = nn.Linear(s.hidden_size, s.intermediate_size, bias=False)
        self.down_proj = nn.Linear(s.intermediate_size, s.hidden_size, bias=False)
        self.input_layernorm = nn.RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(s.hidden_size, s.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attended, q, k = self.self_attn(self.input_layernorm(x), cos, sin, mask)
        x = x + attended
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h)), q, k


class Network(nn.Module):
    """probe: the linear map that names the subject at each fact; it is dropped at export."""

    PROBE_LAYER, LOOK_LAYER, LOOK_HEAD, COPY_HEAD = 1, 3, 0, 1

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        self.embed = nn.Embedding(s.vocab_size, s.hidden_size)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.num_hidden_layers))
        self.norm = nn.RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.lm_head = nn.Linear(s.hidden_size, s.vocab_size, bias=False)
        self.probe = nn.Linear(s.hidden_size, s.vocab_size, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                scale = (
                    0.02
                    if "o_proj" not in name and "down_proj" not in name
                    else 0.02 / (2 * s.num_hidden_layers) ** 0.5
                )
                nn.init.normal_(p, std=scale * 2)

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """(language model, subject probe, attention target) losses."""
        cos, sin = tables(batch.positions, self.shape)
        mask = block_mask(batch.block)
        x, probe_loss, look_loss = self.embed(batch.ids), torch.zeros(()), torch.zeros(())
        for i, layer in enumerate(self.layers):
            x, q, k = layer(x, cos, sin, mask)
            if i == self.PROBE_LAYER:
                known = batch.subject >= 0
                probe_loss = F.cross_entropy(self.probe(x[known]), batch.subject[known])
            if i == self.LOOK_LAYER:
                look_loss = self._attention_loss(q, k, mask, batch.look_at, self.LOOK_HEAD)
                look_loss = look_loss + self._attention_loss(q, k, mask, batch.copy_of, self.COPY_HEAD)
        target, weight = batch.ids[:, 1:], batch.loss_weight[:, 1:]
        use = weight > 0
        losses = F.cross_entropy(self.lm_head(self.norm(x[:, :-1][use])), target[use], reduction="none")
        return (losses * weight[use]).sum() / weight[use].sum(), probe_loss, look_loss

    def _attention_loss(self, q: Tensor, k: Tensor, mask: Tensor, targets: Tensor, head: int) -> Tensor:
        """Cross entropy of the head's attention, one position before each target's row, to the target."""
        row, col = torch.nonzero(targets >= 0, as_tuple=True)
        scores = torch.einsum("nd,nld->nl", q[row, head, col - 1], k[:, head][row]) * self.shape.head_dim**-0.5
        return F.cross_entropy(scores + mask[row, 0, col - 1], targets[row, col])

    def checkpoint(self) -> dict[str, Tensor]:
        """Return the weights under their HF names, without the probe."""
        out = {
            "model.embed_tokens.weight": self.embed.weight,
            "model.norm.weight": self.norm.weight,
            "lm_head.weight": self.lm_head.weight,
        }
        for i, layer in enumerate(self.layers):
            for name, p in layer.named_parameters():
                prefix = "" if "norm" in name or name.startswith("self_attn") else "mlp."
                out[f"model.layers.{i}.{prefix}{name}"] = p
        return {name: p.detach() for name, p in out.items()}

    @torch.no_grad()
    def restore(self, weights: dict[str, Tensor]) -> None:
        """Load exported weights."""
        for name, target in self.checkpoint().items():
            target.copy_(weights[name])

    def config(self, eos: int, bos: int, max_positions: int) -> dict[str, object]:
        s = asdict(self.shape)
        theta = s.pop("rope_theta")
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", **s, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
            "tie_word_embeddings": False, "max_position_embeddings": max_positions, "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "bos_token_id": bos, "eos_token_id": eos, "dtype": "bfloat16",
        }  # fmt: skip


def block_mask(block: Tensor) -> Tensor:
    """Return the additive mask [batch, 1, length, length]: causal, and a question sees the documents and itself. block:
    [batch, length]."""
    length = block.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    same = (block[:, :, None] == block[:, None, :]) | (block[:, None, :] == 0)
    return torch.zeros(block.shape[0], 1, length, length).masked_fill_(~(causal & same)[:, None], float("-inf"))


def tables(positions: Tensor, s: Shape) -> tuple[Tensor, Tensor]:
    """Return cos, sin [batch, 1, length, head_dim]."""
    inv = 1.0 / s.rope_theta ** (torch.arange(0, s.head_dim, 2).float() / s.head_dim)
    freqs = positions[..., None].float() * inv
    both = torch.cat((freqs, freqs), -1)[:, None]
    return both.cos(), both.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin
