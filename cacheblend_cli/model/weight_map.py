"""Tensors in a checkpoint of a spec, and their places in our fused tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping

from cacheblend_cli.model.spec import ExpertsSpec, LatentSpec, ModelSpec

TOKEN_EMBEDDING = "token_embed"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

# Llama's names of the parts of a layer, in `model.layers.i`.
NAMES = {
    **{part: f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm")},
    **{part: f"self_attn.{part}" for part in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")},
    **{part: f"mlp.{part}" for part in ("gate_proj", "up_proj", "gate_up_proj", "down_proj")},
}


Shape = tuple[int, ...]
FusedTensor = tuple[str, list[tuple[str, int]], int, bool]
"""(our tensor, the checkpoint's tensors in it (or keys of NAMES) with their rows, columns, whether it has a bias)."""


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[Shape, str, int, Shape]]:
    """Return HF name -> (its shape, our tensor, first row in it, shape of our tensor).

    Our tensors:

    - embed, norm, lm_head
    - layer i: `i.qkv_proj.weight` [q + 2 kv, hidden], `i.o_proj.weight`, `i.gate_up_proj.weight` [2 * intermediate,
      hidden] (only up if the MLP has no gate), `i.down_proj.weight`, `i.attention_in.weight` and the spec's other
      norms, `i.q_norm`, `i.k_norm`, and the spec's biases; only q in a layer that uses another layer's K and V
    - inputs by token: `token_embed` [token_vocab, layers * token_width], `token_model`, `token_norm`; per layer
      `i.token_gate`, `i.token_projection`, `i.token_out`
    - several streams: `streams_in.i`, `streams_out.i` [hidden, hidden]; per layer `i.streams_router`, `i.streams_norm`,
      `i.streams_predict`, `i.streams_correct`, `i.streams_scale`, `i.laurel_left`, `i.laurel_right`, `i.laurel_norm`
    - attention with sinks: `i.sinks` [heads]
    - experts: `i.router.weight` [count, hidden], `i.experts_up.weight` [count * 2 * width, hidden] (gate and up of each
      expert in turn), `i.experts_down.weight` [count * hidden, width]; a shared expert is in place of the MLP, with
      `i.shared_gate.weight`; beside the MLP also the MLP, `i.router_scale` [hidden] and `i.expert_scale` [count]; with
      a correcting router `i.router_correction` [count]
    - latent attention: the rows of `i.qkv_proj.weight` are q (or q's latent), latent, and position key;
      `i.q_b_proj.weight`, `i.q_a_norm`, `i.kv_b_proj.weight`, `i.kv_a_norm`
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
    if width := spec.token_width * spec.num_layers:
        whole("model.embed_tokens_per_layer.weight", TOKEN_EMBEDDING, spec.token_vocab, width)
        whole("model.per_layer_model_projection.weight", "token_model.weight", width, hidden)
        whole("model.per_layer_projection_norm.weight", "token_norm.weight", spec.token_width)
    if spec.streams is not None:
        for i in range(1, spec.streams.count):
            whole(f"model.altup_projections.{i - 1}.weight", f"streams_in.{i}.weight", hidden, hidden)
            whole(f"model.altup_unembed_projections.{i - 1}.weight", f"streams_out.{i}.weight", hidden, hidden)
    for i in range(spec.num_layers):
        base = f"model.layers.{i}"
        for place, name in spec.norms:
            norm(f"{base}.{name}", f"{i}.{place}")
        if spec.qk_norm:
            dim = spec.heads_of(i)[1]
            widths = (spec.q_size, spec.kv_size) if spec.qk_norm_over_all else (dim, dim)
            for part, width in zip(("q_norm", "k_norm"), widths, strict=True):
                if part == "k_norm" and spec.kv_layer(i) != i:
                    continue
                whole(f"{base}.{names[part]}.weight", f"{i}.{part}", width)
        if spec.sinks:
            whole(f"{base}.self_attn.sinks", f"{i}.sinks", spec.num_heads)
        if spec.latent is not None:
            whole(f"{base}.self_attn.kv_a_layernorm.weight", f"{i}.kv_a_norm", spec.latent.rank)
            if spec.latent.query_rank:
                whole(f"{base}.self_attn.q_a_layernorm.weight", f"{i}.q_a_norm", spec.latent.query_rank)
        experts = spec.experts if spec.experts is not None and i in spec.experts.layers else None
        if experts is not None and experts.routing is not None and experts.routing.sigmoid:
            whole(
                f"{base}.{experts.base}.{experts.router}.e_score_correction_bias",
                f"{i}.router_correction",
                experts.count,
            )
        if spec.layer_scale:
            whole(f"{base}.layer_scalar", f"{i}.layer_scalar", 1)
        if spec.token_width:
            whole(f"{base}.per_layer_input_gate.weight", f"{i}.token_gate.weight", spec.token_width, hidden)
            whole(f"{base}.per_layer_projection.weight", f"{i}.token_projection.weight", hidden, spec.token_width)
            whole(f"{base}.post_per_layer_input_norm.weight", f"{i}.token_out.weight", hidden)
        if spec.streams is not None:
            count, rank = spec.streams.count, spec.streams.low_rank
            whole(f"{base}.altup.modality_router.weight", f"{i}.streams_router.weight", count, hidden)
            whole(f"{base}.altup.router_norm.weight", f"{i}.streams_norm.weight", hidden)
            whole(f"{base}.altup.prediction_coefs.weight", f"{i}.streams_predict.weight", count * count, count)
            whole(f"{base}.altup.correction_coefs.weight", f"{i}.streams_correct.weight", count, count)
            whole(f"{base}.altup.correct_output_scale", f"{i}.streams_scale", hidden)
            whole(f"{base}.laurel.linear_left.weight", f"{i}.laurel_left.weight", rank, hidden)
            whole(f"{base}.laurel.linear_right.weight", f"{i}.laurel_right.weight", hidden, rank)
            whole(f"{base}.laurel.post_laurel_norm.weight", f"{i}.laurel_norm.weight", hidden)
        mlp = [] if experts is None else _experts(hidden, experts)
        if experts is None or experts.beside:
            mlp += _mlp(spec, i)
        if experts is not None and experts.beside:
            whole(f"{base}.router.scale", f"{i}.router_scale", hidden)
            whole(f"{base}.router.per_expert_scale", f"{i}.expert_scale", experts.count)
        attention = _attention(spec, i) if spec.latent is None else _latent_attention(spec, spec.latent)
        for target, parts, width, bias in attention + mlp:
            start, total = 0, sum(rows for _, rows in parts)
            for part, rows in parts:
                name = f"{base}.{names.get(part, part)}"
                shapes[f"{name}.weight"] = ((rows, width), f"{i}.{target}.weight", start, (total, width))
                if bias:
                    shapes[f"{name}.bias"] = ((rows,), f"{i}.{target}.bias", start, (total,))
                start += rows
    return shapes


def name_in(shapes: Mapping[str, object], stored: str) -> str | None:
    """Return the model's name of a stored tensor: a bare model (LlamaModel) is saved without the `model.` prefix, and a
    language model inside another one with `language_model.` before or after it."""
    own = stored.replace("language_model.", "")
    known = (own, f"model.{own}", own.removeprefix("model."))
    return next((name for name in known if name in shapes), None)


def num_parameters(spec: ModelSpec) -> int:
    """Return the number of parameters of a decoder; a tied head is the embedding."""
    shapes = {target: shape for _, target, _, shape in expected_shapes(spec).values()}
    return sum(math.prod(shape) for shape in shapes.values())


def _attention(spec: ModelSpec, layer: int) -> list[FusedTensor]:
    heads, dim = spec.heads_of(layer)
    q_size = spec.num_heads * dim
    qkv = [("q_proj", q_size), ("k_proj", heads * dim), ("v_proj", heads * dim)]
    if spec.shapes is not None:
        qkv = qkv[: 1 if spec.kv_layer(layer) != layer else 2 if spec.shapes.values_of_keys[layer] else 3]
    if "qkv_proj" in spec.fused:
        qkv = [("qkv_proj", spec.q_size + 2 * spec.kv_size)]
    return [
        ("qkv_proj", qkv, spec.hidden_size, spec.qkv_bias),
        ("o_proj", [("o_proj", spec.hidden_size)], q_size, spec.o_bias),
    ]


def _latent_attention(spec: ModelSpec, latent: LatentSpec) -> list[FusedTensor]:
    first = ("q_a_proj", latent.query_rank) if latent.query_rank else ("q_proj", spec.q_size)
    made = spec.num_heads * (latent.nope_dim + latent.value_dim)
    products = [
        ("qkv_proj", [first, ("kv_a_proj_with_mqa", latent.rank + spec.head_dim)], spec.hidden_size, spec.qkv_bias),
        ("kv_b_proj", [("kv_b_proj", made)], latent.rank, False),
        ("o_proj", [("o_proj", spec.hidden_size)], spec.num_heads * latent.value_dim, spec.o_bias),
    ]
    return products + (
        [("q_b_proj", [("q_b_proj", spec.q_size)], latent.query_rank, False)] if latent.query_rank else []
    )


def _mlp(spec: ModelSpec, layer: int) -> list[FusedTensor]:
    inner = spec.mlp_width(layer)
    gate_up = [("gate_proj", inner), ("up_proj", inner)] if spec.gated_mlp else [("up_proj", inner)]
    if "gate_up_proj" in spec.fused:
        gate_up = [("gate_up_proj", 2 * inner)]
    return [
        ("gate_up_proj", gate_up, spec.hidden_size, spec.mlp_bias),
        ("down_proj", [("down_proj", spec.hidden_size)], inner, spec.mlp_bias),
    ]


def _experts(hidden: int, experts: ExpertsSpec) -> list[FusedTensor]:
    """Return the router, and the experts stacked by rows; a shared expert replaces the MLP."""
    base, width, bias, (gate, up, down) = f"{experts.base}.", experts.width, experts.bias, experts.names
    base = base.lstrip(".")  # experts beside the MLP are attributes of the layer itself
    each = [f"{base}experts.{e}" for e in experts.on_rank]
    products = [
        ("router", [(f"{base}{experts.router}", experts.count)], hidden, bias),
        ("experts_up", [(f"{one}.{part}", width) for one in each for part in (gate, up)], hidden, bias),
        ("experts_down", [(f"{one}.{down}", hidden) for one in each], width, bias),
    ]
    if inner := experts.shared_width:
        shared = f"{base}{experts.shared}"
        products += [
            ("gate_up_proj", [(f"{shared}.gate_proj", inner), (f"{shared}.up_proj", inner)], hidden, False),
            ("down_proj", [(f"{shared}.down_proj", hidden)], inner, False),
        ]
        if experts.shared_gate:
            products.append(("shared_gate", [(f"{shared}_gate", 1)], hidden, False))
    return products
