"""Which tensors a checkpoint of a spec holds, and where each goes in ours."""

from __future__ import annotations

from cacheblend_cli.model.spec import ExpertsSpec, ModelSpec

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

# What a Llama calls the parts of a layer, in `model.layers.i`.
NAMES = {
    **{part: f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm")},
    **{part: f"mlp.{part}" for part in ("gate_proj", "up_proj", "gate_up_proj", "down_proj")},
}

Shape = tuple[int, ...]
Product = tuple[str, list[tuple[str, int]], int, bool]
"""Our tensor, the checkpoint's tensors in it and their rows, columns, whether it has a bias."""


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[Shape, str, int, Shape]]:
    """HF name -> (its shape, our tensor, first row in it, shape of our tensor).

    Our tensors: embed, norm, lm_head, and for layer i `i.qkv_proj.weight` [q + 2 kv, hidden], `i.o_proj.weight`,
    `i.gate_up_proj.weight` [2 * intermediate, hidden], up alone where the MLP has no gate, `i.down_proj.weight`,
    `i.attention_in.weight` and the other norms of the spec, `i.q_norm`, `i.k_norm`, and the biases the spec has.
    Of attention with sinks `i.sinks` [heads]. Of a layer with experts `i.router` [count, hidden], `i.experts_up`
    [count * 2 * width, hidden], gate and up of each in turn, `i.experts_down` [count * hidden, width], their biases with
    `_bias` behind these names, and with one for all tokens that one's MLP and `i.shared_gate`.
    """
    hidden, shapes, names = spec.hidden_size, dict[str, tuple[Shape, str, int, Shape]](), NAMES | dict(spec.renamed)

    def whole(name: str, target: str, *shape: int) -> None:
        shapes[name] = (shape, target, 0, shape)

    def norm(name: str, target: str) -> None:
        whole(f"{name}.weight", f"{target}.weight", hidden)
        if spec.norm_bias:
            whole(f"{name}.bias", f"{target}.bias", hidden)

    whole(EMBEDDING, "embed", spec.vocab_size, hidden)
    norm("model.norm", "norm")
    if not spec.tied:
        whole(HEAD, "lm_head", spec.vocab_size, hidden)
    for i in range(spec.num_layers):
        base = f"model.layers.{i}"
        for place, name in spec.norms:
            norm(f"{base}.{name}", f"{i}.{place}")
        if spec.qk_norm:
            widths = (spec.q_size, spec.kv_size) if spec.qk_norm_over_all else (spec.head_dim, spec.head_dim)
            for part, width in zip(("q_norm", "k_norm"), widths, strict=True):
                whole(f"{base}.{names[part]}.weight", f"{i}.{part}", width)
        if spec.sinks:
            whole(f"{base}.self_attn.sinks", f"{i}.sinks", spec.num_heads)
        sparse = spec.experts is not None and i in spec.experts.layers
        for target, parts, width, bias in _attention(spec) if sparse else _attention(spec) + _mlp(spec):
            start, total = 0, sum(rows for _, rows in parts)
            for part, rows in parts:
                name = f"{base}.{names[part]}"
                shapes[f"{name}.weight"] = ((rows, width), f"{i}.{target}.weight", start, (total, width))
                if bias:
                    shapes[f"{name}.bias"] = ((rows,), f"{i}.{target}.bias", start, (total,))
                start += rows
        if spec.experts is not None and sparse:
            _add_experts(shapes, spec, spec.experts, i)
    return shapes


def _add_experts(
    shapes: dict[str, tuple[Shape, str, int, Shape]], spec: ModelSpec, experts: ExpertsSpec, i: int
) -> None:
    """The router, and the experts one below another; the one for all tokens takes the place of the MLP."""
    hidden, width, base = spec.hidden_size, experts.width, f"model.layers.{i}.{experts.base}"
    gate, up, down = experts.names

    def part(name: str, target: str, rows: int, start: int, total: int, columns: int) -> None:
        shapes[f"{base}.{name}.weight"] = ((rows, columns), f"{i}.{target}", start, (total, columns))
        if experts.bias:
            shapes[f"{base}.{name}.bias"] = ((rows,), f"{i}.{target}_bias", start, (total,))

    part(experts.router, "router", experts.count, 0, experts.count, hidden)
    for e in range(experts.count):
        for name, start in ((gate, 2 * e * width), (up, (2 * e + 1) * width)):
            part(f"experts.{e}.{name}", "experts_up", width, start, 2 * experts.count * width, hidden)
        part(f"experts.{e}.{down}", "experts_down", hidden, e * hidden, experts.count * hidden, width)
    if shared := experts.shared_width:
        for name, start in (("gate_proj", 0), ("up_proj", shared)):
            shapes[f"{base}.shared_expert.{name}.weight"] = (
                (shared, hidden), f"{i}.gate_up_proj.weight", start, (2 * shared, hidden),
            )  # fmt: skip
        shapes[f"{base}.shared_expert.down_proj.weight"] = (
            (hidden, shared), f"{i}.down_proj.weight", 0, (hidden, shared),
        )  # fmt: skip
        shapes[f"{base}.shared_expert_gate.weight"] = ((1, hidden), f"{i}.shared_gate", 0, (1, hidden))


def _attention(spec: ModelSpec) -> list[Product]:
    qkv = [("q_proj", spec.q_size), ("k_proj", spec.kv_size), ("v_proj", spec.kv_size)]
    if "qkv_proj" in spec.fused:
        qkv = [("qkv_proj", spec.q_size + 2 * spec.kv_size)]
    return [
        ("qkv_proj", qkv, spec.hidden_size, spec.qkv_bias),
        ("o_proj", [("o_proj", spec.hidden_size)], spec.q_size, spec.o_bias),
    ]


def _mlp(spec: ModelSpec) -> list[Product]:
    inner = spec.intermediate_size
    gate_up = [("gate_proj", inner), ("up_proj", inner)] if spec.gated_mlp else [("up_proj", inner)]
    if "gate_up_proj" in spec.fused:
        gate_up = [("gate_up_proj", 2 * inner)]
    return [
        ("gate_up_proj", gate_up, spec.hidden_size, spec.mlp_bias),
        ("down_proj", [("down_proj", spec.hidden_size)], inner, spec.mlp_bias),
    ]
