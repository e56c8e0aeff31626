"""Prompts of stored chunks with soft tokens around each (KV Packet, arXiv 2604.13226), differentiable in the soft
tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch_llama import KV, Frozen, expanded, flat, joined, left_padded, rotated


class Wrappers(nn.Module):
    """Soft tokens around each chunk. trailer: embeddings [num_tokens, hidden_size]. header: embeddings as well, or, of
    a deep one, its own K before RoPE and V in every layer, [num_layers, 2, num_tokens, num_kv_heads, head_dim] (prefix
    tuning). All fp32."""

    def __init__(self, header: Tensor, trailer: Tensor) -> None:
        super().__init__()
        self.header, self.trailer = (nn.Parameter(t.detach().float().clone()) for t in (header, trailer))

    @property
    def is_deep(self) -> bool:
        return self.header.dim() > 2

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Return the numbers of header and trailer tokens."""
        return self.header.shape[2 if self.is_deep else 0], len(self.trailer)

    @classmethod
    def of_ids(cls, model: Frozen, header: Sequence[int], trailer: Sequence[int]) -> Wrappers:
        """Return wrappers that are these tokens."""
        return cls(*(model.embed(torch.tensor([*ids], dtype=torch.int64)) for ids in (header, trailer)))

    @classmethod
    def load(cls, path: Path) -> Wrappers:
        found = load_file(path, device=str(torch.get_default_device()))
        return cls(found["header"], found["trailer"])

    def save(self, path: Path) -> None:
        save_file({name: p.detach().contiguous() for name, p in self.named_parameters()}, path)


class Prompts:
    """Prompts of a model: its prefix, chunks behind it, questions behind these."""

    def __init__(self, model: Frozen) -> None:
        self.model, self.prefix_ids = model, model.template.prefix_ids
        self.start = len(self.prefix_ids)
        self.end = -1 if model.end_id is None else model.end_id
        if self.start:
            _, kv = model.behind(model.embed(torch.tensor([self.prefix_ids])), model.no_kv, 0)
            self.prefix = model.placed_from(kv, 0)
        else:
            self.prefix = model.no_kv

    def whole(self, chunks: Sequence[Sequence[int]]) -> KV:
        """Full prefill of prefix and chunks: rotated KV."""
        ids = torch.tensor([[i for chunk in chunks for i in chunk]])
        _, kv = self.model.behind(self.model.embed(ids), self.prefix, self.start)
        return joined(self.prefix, self.model.placed_from(kv, self.start))

    def stored(self, chunks: Sequence[Sequence[int]], wrappers: Wrappers | None) -> KV:
        """Prefix and chunks, each chunk collected alone behind the prefix and rotated to its place. Chunks of one
        length are a batch."""
        together = len({len(c) for c in chunks}) == 1
        batches = [torch.tensor(chunks)] if together else [torch.tensor([c]) for c in chunks]
        kv = joined(*(flat(self._collected(ids, wrappers)) for ids in batches))
        return joined(self.prefix, self.model.placed_from(kv, self.start))

    def header(self, wrappers: Wrappers) -> KV:
        """KV of the header behind the prefix, K before RoPE; the same for every chunk."""
        model, given = self.model, wrappers.header.to(self.model.dtype)
        return (
            [(k[None], v[None]) for k, v in given]
            if wrappers.is_deep
            else model.behind(given[None], self.prefix, self.start)[1]
        )

    def deepened(self, wrappers: Wrappers) -> Wrappers:
        """Return wrappers whose header has K and V of its own, to begin with those it has."""
        return Wrappers(torch.stack([torch.stack(pair)[:, 0] for pair in self.header(wrappers)]), wrappers.trailer)

    def _collected(self, ids: Tensor, wrappers: Wrappers | None) -> KV:
        model, x, count = self.model, self.model.embed(ids), len(ids)
        if wrappers is None:
            return model.behind(x, self.prefix, self.start)[1]
        parts, past, at = list[KV](), self.prefix, self.start
        if wrappers.num_tokens[0]:
            parts.append(self.header(wrappers))
            past, at = joined(past, model.placed_from(parts[0], at)), at + wrappers.num_tokens[0]
        parts.append(model.behind(x, past, at)[1])
        if wrappers.num_tokens[1]:
            past, at = (
                joined(*(expanded(kv, count) for kv in (past, model.placed_from(parts[-1], at)))),
                at + x.shape[1],
            )
            trailer = wrappers.trailer.to(model.dtype).expand(count, -1, -1)
            parts.append(model.behind(trailer, past, at)[1])
        return joined(*(expanded(kv, count) for kv in parts))

    @torch.no_grad()
    def change(self, chunks: Sequence[Sequence[int]]) -> Tensor:
        """Mean change of K before RoPE and of V from stored to full prefill's, over the tokens of all chunks but the
        first, fp32 [num_layers, 2, num_kv_heads, head_dim]."""
        begin = self.start + len(chunks[0])
        pairs = zip(self.whole(chunks), self.stored(chunks, None), strict=True)
        changes = [tuple((a - b)[0, begin:].float() for a, b in zip(*pair, strict=True)) for pair in pairs]
        cos, sin = self.model.turns(torch.arange(begin, begin + len(changes[0][0]))[None])
        back = [(rotated(k[None], (cos, -sin))[0], v) for k, v in changes]
        return torch.stack([torch.stack([part.mean(0) for part in pair]) for pair in back])

    @torch.no_grad()
    def shifted(self, chunks: Sequence[Sequence[int]], change: Tensor) -> KV:
        """`stored` without wrappers, all chunks but the first moved by a change."""
        begin, past = self.start + len(chunks[0]), self.stored(chunks, None)
        turns = self.model.turns(torch.arange(begin, past[0][0].shape[1])[None])
        count, moved = past[0][0].shape[1] - begin, KV()
        for (k, v), (of_k, of_v) in zip(past, change, strict=True):
            more = rotated(of_k.expand(1, count, -1, -1), turns), of_v.expand(1, count, -1, -1)
            parts = (
                torch.cat((x[:, :begin], (x[:, begin:] + m).to(x.dtype)), 1) for x, m in zip((k, v), more, strict=True)
            )
            moved.append((next(parts), next(parts)))
        return moved

    def hidden(self, past: KV, suffixes: Sequence[Sequence[int]], answers: Tensor) -> Tensor:
        """Outputs that predict the answers' tokens, [num_questions, num_answer_tokens, hidden_size]. answers:
        [num_questions, num_answer_tokens]."""
        ids, real = left_padded(suffixes)
        ids = torch.cat((ids, answers[:, :-1]), 1)
        real = torch.cat((real, torch.ones_like(answers[:, :-1], dtype=torch.bool)), 1)
        return self._ask(past, ids, real)[0][:, -answers.shape[1] :]

    def _ask(self, past: KV, ids: Tensor, real: Tensor) -> tuple[Tensor, KV, Tensor]:
        """Run left-padded rows behind the chunks. Returns their outputs, the past with them, and which of its tokens
        each may see."""
        end, count = past[0][0].shape[1], ids.shape[1]
        positions = end + (real.cumsum(1) - 1).clamp_min(0)
        seen = torch.cat((torch.ones(len(ids), end, dtype=torch.bool), real), 1)
        mask = seen[:, None] & torch.ones(count, end + count, dtype=torch.bool).tril(end)
        hidden, own = self.model.run(self.model.embed(ids), positions, past, mask[:, None])
        return hidden, self.model.placed(own, positions), seen

    @torch.inference_mode()
    def answers(self, past: KV, suffixes: Sequence[Sequence[int]], length: int) -> Tensor:
        """Greedy answers [num_questions, at most length], until all have ended."""
        ids, real = left_padded(suffixes)
        hidden, own, seen = self._ask(past, ids, real)
        past = joined(expanded(past, len(ids)), own)
        positions, found = seen.sum(1, keepdim=True), list[Tensor]()
        ended = torch.zeros(len(ids), 1, dtype=torch.bool)
        while len(found) < length and not bool(ended.all()):
            found.append(F.linear(hidden[:, -1], self.model.weights["lm_head"]).argmax(-1, keepdim=True))
            ended |= found[-1] == self.end
            seen = F.pad(seen, (0, 1), value=True)
            hidden, own = self.model.run(self.model.embed(found[-1]), positions, past, seen[:, None, None])
            past = joined(past, self.model.placed(own, positions))
            positions = positions + 1
        return torch.cat(found, 1)
