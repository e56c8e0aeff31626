"""Chunks of a hybrid (Qwen3.5: gated delta layers and some of full attention): bytes a chunk, cost, and error with and
without repair.

    python study/hybrids.py [--chunks 4] [--tokens 96] [--seeds 3]

The sizes are arithmetic on the published shapes. Everything else is measured on tiny random models of the same
architecture, by transformers' own layers: what a chunk is stored as replaces what its tokens compute in the prompt
(`Stored`), except where a token is recomputed. A random model says what is exact and what a repair moves; it does not
say how far a trained model's answers are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

PREFIX, SUFFIX = 16, 24
CHUNK = 512  # tokens, in the table of sizes
HALF_LIVES = (4.0, 4096.0)  # tokens in which a head forgets half; drawn log-uniformly
CHECK_LAYER = 1
Held = dict[tuple[int, str], Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of a hybrid. linear, full: layers of each kind; params: weights that one token is multiplied with."""

    name: str
    config: Any
    params: float
    linear: int = field(init=False)
    full: int = field(init=False)

    def __post_init__(self) -> None:
        kinds = self.config.layer_types
        object.__setattr__(self, "linear", kinds.count("linear_attention"))
        object.__setattr__(self, "full", kinds.count("full_attention"))

    @property
    def state(self) -> int:
        """Numbers of a layer's state."""
        c = self.config
        return c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim

    @property
    def operator(self) -> int:
        """Numbers of a layer's transition and contribution, and of the convolution's inputs at both borders."""
        c = self.config
        return c.linear_num_value_heads * c.linear_key_head_dim**2 + self.state + 2 * self.border

    @property
    def inputs(self) -> int:
        """Numbers a token and layer: q, k and v before the convolution, and both gates."""
        return self.convolved + 2 * self.config.linear_num_value_heads

    @property
    def convolved(self) -> int:
        c = self.config
        keys = c.linear_num_key_heads * c.linear_key_head_dim
        return 2 * keys + c.linear_num_value_heads * c.linear_value_head_dim

    @property
    def border(self) -> int:
        return (self.config.linear_conv_kernel_dim - 1) * self.inputs

    @property
    def kv(self) -> int:
        """Numbers of K and V a token, in the layers with full attention."""
        return 2 * self.full * self.config.num_key_value_heads * self.config.head_dim


def published() -> list[Shape]:
    """Shapes as transformers' classes have them. params: of attention, MLP and head, by the names of the models."""
    return [
        Shape("Qwen3.5-9B", transformers.Qwen3_5TextConfig(), 9e9),
        Shape("Qwen3-Next-80B-A3B", transformers.Qwen3NextConfig(), 3e9),
    ]


def sizes() -> Iterator[str]:
    yield f"| model | linear + full layers | state | operators, fp32 | bf16 | inputs, bf16 | KV, bf16 | operators win from |\n{'|---' * 8}|"
    for shape in published():
        state, operator = shape.linear * shape.state * 4, shape.linear * shape.operator
        inputs, kv = shape.linear * shape.inputs * 2 * CHUNK, shape.kv * 2 * CHUNK
        even = 2 * operator / (shape.linear * shape.inputs * 2)
        cells = [mib(n) for n in (state, operator * 4, operator * 2, inputs, kv)]
        yield f"| {shape.name} | {shape.linear} + {shape.full} | {' | '.join(cells)} | {even:.0f} tokens |"
    yield ""
    yield f"| model | a token, forward | its scan | share | composing a chunk | share of {CHUNK} tokens |\n{'|---' * 6}|"
    for shape in published():
        c = shape.config
        token = 2 * shape.params
        scan = shape.linear * 6 * shape.state  # S^T k, the outer product and its sum, a product and a sum each
        compose = shape.linear * 2 * shape.state * c.linear_key_head_dim
        yield (
            f"| {shape.name} | {token / 1e9:.0f} GFLOP | {scan / 1e9:.3f} GFLOP | {scan / token:.1%} | {compose / 1e9:.1f} GFLOP | "
            f"{compose / token / CHUNK:.3%} |"
        )


def mib(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"


def tiny(kinds: Sequence[str], seed: int) -> Any:
    """A random model of these layers, whose heads forget at different speeds."""
    torch.manual_seed(seed)
    config = transformers.Qwen3_5TextConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=len(kinds), num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=16,
        linear_value_head_dim=16, layer_types=list(kinds),
    )  # fmt: skip
    model = transformers.Qwen3_5ForCausalLM(config).float().eval()
    shortest, longest = (torch.tensor(n).log() for n in HALF_LIVES)
    for name, p in model.named_parameters():
        if name.endswith("A_log"):  # a head's decay a token is exp(-exp(A_log) softplus(a)), and softplus(0) is log 2
            p.data = -(shortest + torch.rand_like(p) * (longest - shortest))
        elif name.endswith("dt_bias"):
            p.data.zero_()
        elif "norm" in name:
            p.data = (1.0 if "linear_attn" in name else 0.0) + 0.1 * torch.randn_like(p)
        else:
            p.data = torch.randn_like(p) * (
                1.0 if "embed" in name else 1.5 * p.shape[-1] ** -0.5 if p.dim() == 2 else 0.5
            )
    return model


PARTS = (
    "linear_attn.in_proj_qkv",
    "linear_attn.in_proj_b",
    "linear_attn.in_proj_a",
    "self_attn.k_norm",
    "self_attn.v_proj",
)
"""What is stored of a token: of linear layers what goes into the convolution and both gates, of the others K before
RoPE and V."""


@contextmanager
def watched(model: Any, held: Held, old: Held | None, stale: dict[int, Tensor]) -> Iterator[None]:
    """Keep the PARTS of every layer in `held`, and put the old ones in the place of a layer's stale rows (a mask
    [num_tokens])."""
    hooks = []
    for index, layer in enumerate(model.model.layers):
        for part in PARTS:
            found = dict(layer.named_modules()).get(part)
            if found is None:
                continue

            def hook(module: Any, given: Any, out: Tensor, key: tuple[int, str] = (index, part)) -> Tensor:
                if old is not None and key[0] in stale:
                    rows = stale[key[0]].view(-1, *[1] * (out.dim() - 2))
                    out = torch.where(rows, old[key], out[0])[None]
                held[key] = out[0].clone()
                return out

            hooks.append(found.register_forward_hook(hook))
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


def run(
    model: Any, ids: list[int], old: Held | None = None, stale: dict[int, Tensor] | None = None
) -> tuple[Tensor, Held]:
    """Logits of the question, and what every layer computed from."""
    held: Held = {}
    with watched(model, held, old, stale or {}):
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, -SUFFIX:]
    return logits, held


Steps = tuple[Tensor, ...]
"""k [tokens, heads, d_k], v [tokens, heads, d_v], decay and beta [tokens, heads], of all linear layers' value heads;
float64."""


def steps(model: Any, held: Held) -> Steps:
    found = [
        _steps_of(layer.linear_attn, held, i)
        for i, layer in enumerate(model.model.layers)
        if hasattr(layer, "linear_attn")
    ]
    return tuple(torch.cat(parts, 1) for parts in zip(*found, strict=True))


def _steps_of(m: Any, held: Held, index: int) -> Steps:
    mixed, beta, a = (held[index, part].double() for part in PARTS[:3])
    padded = F.pad(mixed.T[None], (m.conv_kernel_size - 1, 0))
    mixed = F.silu(F.conv1d(padded, m.conv1d.weight.double(), groups=m.conv_dim))[0].T
    _, k, v = mixed.split([m.key_dim, m.key_dim, m.value_dim], -1)
    k, v = k.unflatten(-1, (m.num_k_heads, -1)), v.unflatten(-1, (m.num_v_heads, -1))
    k = (k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(m.num_v_heads // m.num_k_heads, 1)
    decay = (-m.A_log.double().exp() * F.softplus(a + m.dt_bias.double())).exp()
    return k, v, decay, beta.sigmoid()


def operator(of: Steps, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Transition [heads, d_k, d_k] and contribution [heads, d_k, d_v] of these tokens: they make A S + B of a state
    S."""
    k, v, decay, beta = (t.to(dtype) for t in of)
    heads, dim = k.shape[1:]
    transition = torch.eye(dim, dtype=dtype).repeat(heads, 1, 1)
    both = scan(torch.cat((transition, torch.zeros(heads, dim, v.shape[-1], dtype=dtype)), -1), (k, v, decay, beta))
    return both[..., :dim], both[..., dim:]


def scan(state: Tensor, of: Steps) -> Tensor:
    """The state [heads, d_k, n] behind these tokens. What they add is added to its last d_v columns."""
    for k, v, decay, beta in zip(*of, strict=True):
        state = state * decay[:, None, None]
        change = -torch.einsum("hk,hkn->hn", k, state)
        change[:, -v.shape[-1] :] += v
        state = torch.baddbmm(state, k[:, :, None], (change * beta[:, None])[:, None])
    return state


@dataclass(frozen=True)
class Prompt:
    """prefix, chunks and question: ids, and the rows of the chunks."""

    ids: list[int]
    chunks: list[slice]

    @classmethod
    def drawn(cls, num_chunks: int, num_tokens: int, seed: int) -> Prompt:
        torch.manual_seed(seed + 1000)
        total = PREFIX + num_chunks * num_tokens + SUFFIX
        starts = range(PREFIX, total - SUFFIX, num_tokens)
        return cls(torch.randint(0, 512, (total,)).tolist(), [slice(s, s + num_tokens) for s in starts])

    @property
    def reusable(self) -> Tensor:
        """Mask of the tokens whose context differs from the one they were collected in: all chunks but the first."""
        mask = torch.zeros(len(self.ids), dtype=torch.bool)
        mask[self.chunks[1].start : self.chunks[-1].stop] = True
        return mask


def collected(model: Any, prompt: Prompt, whole: Held) -> Held:
    """What the store has: each chunk computed behind the prefix alone."""
    old = {key: value.clone() for key, value in whole.items()}
    for rows in prompt.chunks[1:]:
        _, alone = run(model, prompt.ids[:PREFIX] + prompt.ids[rows])
        for key, value in alone.items():
            old[key][rows] = value[PREFIX:]
    return old


def composing(model: Any, prompt: Prompt, whole: Held) -> dict[str, float]:
    """Relative error of the states after the last chunk: chunks composed, given the inputs that they have in the
    prompt."""
    of, end = steps(model, whole), prompt.chunks[-1].stop
    truth = final_state(model, whole, end, torch.float64)
    start = final_state(model, whole, PREFIX, torch.float64).float()
    own = [tuple(t[rows] for t in of) for rows in prompt.chunks]
    anew = [steps(model, {key: value[rows] for key, value in whole.items()}) for rows in prompt.chunks]

    def composed(chunks: Sequence[Steps], kept: torch.dtype = torch.float32) -> Tensor:
        state = start
        for chunk in chunks:
            transition, contribution = (t.to(kept).float() for t in operator(chunk, torch.float32))
            state = transition @ state + contribution
        return state

    found = {
        "token by token, fp32": final_state(model, whole, end, torch.float32),
        "composed, fp32": composed(own),
        "composed, operators stored in bf16": composed(own, torch.bfloat16),
        "composed, the convolution beginning anew in each chunk": composed(anew),
        "the last chunk's contribution alone": operator(own[-1], torch.float32)[1],
    }
    return {name: apart(state, truth) for name, state in found.items()}


def final_state(model: Any, held: Held, end: int, dtype: torch.dtype) -> Tensor:
    """States of all linear layers behind the first `end` tokens, one below another: [layers * heads, d_k, d_v]."""
    of = tuple(t[:end].to(dtype) for t in steps(model, held))
    heads, d_k, d_v = *of[0].shape[1:], of[1].shape[-1]
    return scan(torch.zeros(heads, d_k, d_v, dtype=dtype), of)


def unrepaired(model: Any, prompt: Prompt, whole: Held) -> list[float]:
    """Relative error of each linear layer's state after the last chunk: chunks composed as they were collected."""
    old, end = collected(model, prompt, whole), prompt.chunks[-1].stop
    _, held = run(model, prompt.ids, old, dict.fromkeys(range(len(model.model.layers)), prompt.reusable))
    states = [final_state(model, of, end, torch.float64) for of in (held, whole)]
    count = sum(hasattr(layer, "linear_attn") for layer in model.model.layers)
    return [apart(*pair) for pair in zip(*(state.chunk(count) for state in states), strict=True)]


def apart(a: Tensor, b: Tensor) -> float:
    """Relative error, mean over heads."""
    return float(((a.double() - b.double()).norm(dim=(1, 2)) / b.double().norm(dim=(1, 2))).mean())


def repaired(model: Any, prompt: Prompt, ratios: Sequence[float]) -> list[tuple[str, float, float, float]]:
    """(selection, ratio, KL of the question's tokens from the full prefill, relative error of the states) for stored
    chunks."""
    full, whole = run(model, prompt.ids)
    old, reusable = collected(model, prompt, whole), prompt.reusable
    part = PARTS[0] if (CHECK_LAYER, PARTS[0]) in whole else PARTS[3]
    moved = (whole[CHECK_LAYER, part] - old[CHECK_LAYER, part]).flatten(1).square().sum(1).masked_fill(~reusable, -1)
    scores = {"largest change": moved, "random": torch.rand(len(prompt.ids)).masked_fill(~reusable, -1)}
    found, layers, end = [], len(model.model.layers), prompt.chunks[-1].stop
    truth = final_state(model, whole, end, torch.float64) if (0, PARTS[0]) in whole else None
    for name, score in scores.items():
        for ratio in ratios:
            chosen = score.argsort(descending=True)[: round(ratio * int(reusable.sum()))]
            mask = reusable.clone()
            mask[chosen] = False
            logits, held = run(
                model, prompt.ids, old, dict.fromkeys(range(CHECK_LAYER + 1 if ratio else 0, layers), mask)
            )
            divergence = F.kl_div(logits.log_softmax(-1), full.log_softmax(-1), log_target=True, reduction="batchmean")
            state = final_state(model, held, end, torch.float64) if truth is not None else None
            error = 0.0 if truth is None or state is None else apart(state, truth)
            found.append((name, ratio, float(divergence), error))
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96, help="tokens of a chunk")
    parser.add_argument("--seeds", type=int, default=3, help="random models")
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)  # everything is small
    print(f"A chunk of {CHUNK} tokens\n")
    print("\n".join(sizes()))
    hybrid, ratios = [*["linear_attention"] * 3, "full_attention"] * 2, (0.0, 0.15, 0.3, 0.5, 1.0)
    composed: dict[str, list[float]] = {}
    by_layer: list[list[float]] = []
    rows: dict[tuple[str, str, float], list[tuple[float, float]]] = {}
    for seed in range(arguments.seeds):
        prompt = Prompt.drawn(arguments.chunks, arguments.tokens, seed)
        for kind, kinds in (("hybrid", hybrid), ("full attention", ["full_attention"] * 8)):
            model = tiny(kinds, seed)
            if kind == "hybrid":
                whole = run(model, prompt.ids)[1]
                for name, error in composing(model, prompt, whole).items():
                    composed.setdefault(name, []).append(error)
                by_layer.append(unrepaired(model, prompt, whole))
            for name, ratio, divergence, state in repaired(model, prompt, ratios):
                rows.setdefault((kind, name, ratio), []).append((divergence, state))
        print(f"model {seed + 1} of {arguments.seeds}", file=sys.stderr)
    print(f"\n{arguments.seeds} random models, {arguments.chunks} chunks of {arguments.tokens} tokens\n")
    print("| state after the last chunk, given the same inputs | relative error |\n|---|---|")
    for name, errors in composed.items():
        print(f"| {name} | {sum(errors) / len(errors):.1e} |")
    layers = [i for i, kind in enumerate(hybrid) if kind == "linear_attention"]
    print(f"\n| layer | {' | '.join(map(str, layers))} |\n{'|---' * (len(layers) + 1)}|")
    means = (sum(errors) / len(errors) for errors in zip(*by_layer, strict=True))
    print(f"| error of its state, nothing recomputed | {' | '.join(f'{mean:.1%}' for mean in means)} |")
    print("\n| model | recomputed | ratio | KL | of no repair's | error of states |\n|---|---|---|---|---|---|")
    for (kind, name, ratio), values in rows.items():
        divergence, state = (sum(v[i] for v in values) / len(values) for i in (0, 1))
        nothing = sum(v[0] for v in rows[kind, name, 0.0]) / len(values)
        least, most = min(v[0] for v in values), max(v[0] for v in values)
        print(
            f"| {kind} | {name} | {ratio} | {divergence:.3g} ({least:.3g} to {most:.3g}) | {divergence / nothing:.0%} | {f'{state:.0%}' if kind == 'hybrid' else ''} |"
        )
    print("\n" + "\n".join(by_model(rows, ratios[1:-1])))


def by_model(rows: dict[tuple[str, str, float], list[tuple[float, float]]], ratios: Sequence[float]) -> Iterator[str]:
    """Compare hybrid with control, and selection with selection, model by model."""

    def kl(*of: Any) -> list[float]:
        return [value[0] for value in rows[of]]

    times = sorted(h / f for h, f in zip(kl("hybrid", "random", 0.0), kl("full attention", "random", 0.0), strict=True))
    yield f"nothing recomputed: KL of the hybrid over full attention's, by model: {' '.join(f'{t:.0f}' for t in times)}"
    for kind in ("hybrid", "full attention"):
        for ratio in ratios:
            pairs = list(zip(kl(kind, "largest change", ratio), kl(kind, "random", ratio), strict=True))
            yield f"{kind} {ratio}: largest change nearer than random in {sum(a < b for a, b in pairs)} of {len(pairs)} models"


if __name__ == "__main__":
    main()
