"""Which tensors a checkpoint of a spec holds, and where each goes in ours."""

from __future__ import annotations

from cacheblend_cli.model.spec import ModelSpec

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

# What a Llama calls the parts of a layer, in `model.layers.i`.
NAMES = {
    **{part: f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm")},
    **{part: f"mlp.{part}" for part in ("gate_proj", "up_proj", "gate_up_proj", "down_proj")},
}

Shape = tuple[int, ...]


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[Shape, str, int, Shape]]:
    """HF name -> (its shape, our tensor, first row in it, shape of our tensor).

    Our tensors: embed, norm, lm_head, and for layer i `i.qkv_proj.weight` [q + 2 kv, hidden], `i.o_proj.weight`,
    `i.gate_up_proj.weight` [2 * intermediate, hidden], up alone where the MLP has no gate, `i.down_proj.weight`,
    `i.attention_in.weight` and the other norms of the spec, `i.q_norm`, `i.k_norm`, and the biases the spec has.
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
        for target, parts, width, bias in _products(spec):
            start, total = 0, sum(rows for _, rows in parts)
            for part, rows in parts:
                name = f"{base}.{names[part]}"
                shapes[f"{name}.weight"] = ((rows, width), f"{i}.{target}.weight", start, (total, width))
                if bias:
                    shapes[f"{name}.bias"] = ((rows,), f"{i}.{target}.bias", start, (total,))
                start += rows
    return shapes


def _products(spec: ModelSpec) -> list[tuple[str, list[tuple[str, int]], int, bool]]:
    """(our tensor, the checkpoint's tensors in it and their rows, columns, whether it has a bias) of a layer's products."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    qkv = [("q_proj", spec.q_size), ("k_proj", spec.kv_size), ("v_proj", spec.kv_size)]
    gate_up = [("gate_proj", inner), ("up_proj", inner)] if spec.gated_mlp else [("up_proj", inner)]
    if "qkv_proj" in spec.fused:
        qkv = [("qkv_proj", spec.q_size + 2 * spec.kv_size)]
    if "gate_up_proj" in spec.fused:
        gate_up = [("gate_up_proj", 2 * inner)]
    return [
        ("qkv_proj", qkv, hidden, spec.qkv_bias),
        ("o_proj", [("o_proj", hidden)], spec.q_size, spec.o_bias),
        ("gate_up_proj", gate_up, hidden, spec.mlp_bias),
        ("down_proj", [("down_proj", hidden)], inner, spec.mlp_bias),
    ]
