"""Tensor parallelism: the part of a model that one rank computes (Megatron-LM, arXiv 1909.08053, as vLLM names the
layers).

A rank computes a smaller model (`RankShard.own`): some of the heads, a part of the MLP's width, some of the experts,
some rows of the vocabulary. From each tensor of the checkpoint it reads a `Cut`:

| layer | tensors | cut |
|---|---|---|
| QKVParallelLinear | q, k, v, apart or fused | rows by head; with fewer KV heads than ranks, ranks share a head |
| MergedColumnParallelLinear | gate and up, apart or fused | rows of each |
| RowParallelLinear | o_proj, down_proj | columns, the sum is reduced; the bias on rank 0 |
| VocabParallelEmbedding, ParallelLMHead | embedding, head | rows; the sum is reduced, the logits are gathered |
| experts | | whole experts; the sum is reduced |

All other tensors are on every rank.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch.nn.functional as F
from torch import Tensor

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.adapter import Delta
from cacheblend_cli.model.parallel import Shard
from cacheblend_cli.model.ranks import Ranks
from cacheblend_cli.model.sharded import Cut, Runs, ShardedTensors, cut_deltas
from cacheblend_cli.model.spec import ModelSpec
from cacheblend_cli.model.tensor_source import TensorSource
from cacheblend_cli.model.weight_map import EMBEDDING, HEAD, expected_shapes

VOCABULARY = 64  # a rank's vocabulary rows are padded to a multiple of this


class RankShard(Shard):
    """The part of a model on one of several ranks. Raises UsageError, with sizes that fit, for a model that cannot be
    divided by the number of ranks."""

    is_whole = False
    ranks: Ranks

    def __init__(self, spec: ModelSpec, ranks: Ranks) -> None:
        check_divisible(spec, ranks.size)
        self.whole, self.ranks = spec, ranks
        rank, size = ranks.rank, ranks.size
        heads, (first, end) = spec.num_heads // size, self.vocabulary
        shapes, experts = spec.shapes, spec.experts
        if shapes is not None:
            kv_heads, widths = (max(1, n // size) for n in shapes.kv_heads), (n // size for n in shapes.mlp_widths)
            shapes = replace(shapes, kv_heads=tuple(kv_heads), mlp_widths=tuple(widths))
        if experts is not None:
            held = experts.count // size
            experts = replace(experts, held=(rank * held, held), shared_width=experts.shared_width // size)
        self.own = replace(
            spec,
            vocab_size=end - first,
            num_heads=heads,
            num_kv_heads=max(1, spec.num_kv_heads // size),
            intermediate_size=spec.intermediate_size // size,
            shapes=shapes,
            experts=experts,
        )

    # vocabulary

    @cached_property
    def vocabulary_width(self) -> int:
        """Vocabulary rows of a rank; the last rank's weights may have fewer."""
        size, count = self.ranks.size, self.whole.vocab_size
        even = -(-count // size)
        rounded = -(-even // VOCABULARY) * VOCABULARY
        return rounded if (size - 1) * rounded < count else even

    @property
    def vocabulary(self) -> tuple[int, int]:
        first = self.ranks.rank * self.vocabulary_width
        return first, min(first + self.vocabulary_width, self.whole.vocab_size)

    def gathered_logits(self, logits: Tensor) -> Tensor:
        if missing := self.vocabulary_width - logits.shape[-1]:
            logits = F.pad(logits, (0, missing))
        return self.ranks.gather(logits, -1)[..., : self.whole.vocab_size]

    # heads

    def copies(self, layer: int) -> int:
        """Return the number of ranks that have the same KV heads of a layer."""
        return max(1, self.ranks.size // self.whole.heads_of(layer)[0])

    def kv_heads(self, layer: int) -> tuple[int, int]:
        """Return the layer's KV heads on this rank: (first, end)."""
        count = max(1, self.whole.heads_of(layer)[0] // self.ranks.size)
        first = self.ranks.rank // self.copies(layer) * count
        return first, first + count

    def sum_of_kv(self, x: Tensor, layer: int) -> Tensor:
        return self.ranks.sum(x if self.ranks.rank % self.copies(layer) == 0 else x.new_zeros(x.shape))

    def first_head(self, layer: int) -> int:
        return self.kv_heads(layer)[0]

    def own_heads(self, x: Tensor, layer: int) -> Tensor:
        first, end = self.kv_heads(layer)
        return x.narrow(min(1, x.dim() - 1), first, end - first).contiguous()

    def all_heads(self, x: Tensor, layer: int) -> Tensor:
        return self.ranks.gather(x, 1, self.copies(layer))

    # weights

    def tensors(self, source: TensorSource) -> TensorSource:
        return ShardedTensors(source, self.cuts, self.whole)

    def deltas(self, deltas: dict[str, Delta]) -> dict[str, Delta]:
        return cut_deltas(deltas, self.cuts)

    @cached_property
    def cuts(self) -> dict[str, Cut]:
        """Parts of the checkpoint's tensors that this rank needs, by name in the checkpoint."""
        spec, own = self.whole, expected_shapes(self.own)
        cuts = {
            name: self._cut(target, shape, start, full)
            for name, (shape, target, start, full) in expected_shapes(spec).items()
            if name in own
        }
        if spec.tied:
            cuts[HEAD] = cuts[EMBEDDING]
        return cuts

    def _cut(self, target: str, shape: tuple[int, ...], start: int, full: tuple[int, ...]) -> Cut:
        """Return the rank's part of a tensor. target, start, full: our tensor, the checkpoint tensor's first row in it,
        and its shape."""
        if target in ("embed", "lm_head"):
            return Cut((self.vocabulary,))
        rank, size, spec = self.ranks.rank, self.ranks.size, self.whole
        number, _, part = target.partition(".")
        layer, dim = int(number) if number.isdecimal() else 0, spec.head_dim
        name, _, kind = part.partition(".")
        if name == "qkv_proj":
            return Cut(_within(self._qkv_rows(layer), start, start + shape[0]))
        if name == "gate_up_proj":
            width = full[0] // 2 if spec.gated_mlp else full[0]
            low, high = rank * width // size, (rank + 1) * width // size
            runs = tuple((at + low, at + high) for at in range(0, full[0], width))
            return Cut(_within(runs, start, start + shape[0]))
        if name in ("o_proj", "down_proj"):
            if kind == "bias":
                return Cut(is_zero=rank > 0)
            return Cut(columns=(rank * shape[1] // size, (rank + 1) * shape[1] // size))
        if name == "sinks" or (name == "q_norm" and spec.qk_norm_over_all):
            return Cut(((rank * shape[0] // size, (rank + 1) * shape[0] // size),))
        if name == "k_norm" and spec.qk_norm_over_all:
            first, end = self.kv_heads(layer)
            return Cut(((first * dim, end * dim),))
        return Cut()

    def _qkv_rows(self, layer: int) -> Runs:
        """Return the rank's rows of a layer's concatenated q, k and v."""
        spec, rank, size = self.whole, self.ranks.rank, self.ranks.size
        kv_heads, dim = spec.heads_of(layer)
        first, end = self.kv_heads(layer)
        q = rank * spec.num_heads // size, (rank + 1) * spec.num_heads // size
        k = spec.num_heads
        runs = [q, (k + first, k + end), (k + kv_heads + first, k + kv_heads + end)]
        return tuple((start * dim, stop * dim) for start, stop in runs)


def _within(runs: Runs, start: int, end: int) -> Runs:
    """Return the parts of the runs in start:end, counted from start."""
    cut = ((max(a, start) - start, min(b, end) - start) for a, b in runs)
    return tuple((a, b) for a, b in cut if a < b)


def check_divisible(spec: ModelSpec, size: int) -> None:
    """Raise UsageError, with sizes that fit, if `size` ranks cannot compute a model together."""
    kind = spec.config.get("model_type", spec.architecture)
    other = "generic path" if spec.generic else "latent attention" if spec.latent else ""
    if other:
        reason = f"--tensor-parallel is not implemented for {kind!r} ({other})"
        raise UsageError(reason, "leave --tensor-parallel out")
    if reason := _indivisible(spec, size):
        fits = [str(n) for n in range(2, spec.num_heads + 1) if not _indivisible(spec, n)]
        hint = f"sizes that fit: {', '.join(fits[:8])}" if fits else "leave --tensor-parallel out"
        raise UsageError(f"{size} ranks cannot share {reason}", hint)


def _indivisible(spec: ModelSpec, size: int) -> str:
    """Return the part of the model that `size` ranks cannot share, "" if they can share all."""
    if spec.num_heads % size:
        return f"{spec.num_heads} attention heads"
    for layer in range(spec.num_layers):
        heads, width = spec.heads_of(layer)[0], spec.mlp_width(layer)
        if heads % size and size % heads:
            return f"{heads} KV heads"
        sparse = spec.experts is not None and layer in spec.experts.layers and not spec.experts.beside
        if width % size and not sparse:
            return f"an MLP of width {width}"
    if (experts := spec.experts) is not None and (experts.count % size or experts.shared_width % size):
        shared = f" and one of width {experts.shared_width}" if experts.shared_width else ""
        return f"{experts.count} experts{shared}"
    return ""
