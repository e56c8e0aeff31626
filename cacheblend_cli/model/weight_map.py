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
    shapes = _Shapes(spec)
    shapes.add_outside_layers()
    for layer in range(spec.num_layers):
        base = f"model.layers.{layer}"
        shapes.add_norms(layer, base)
        shapes.add_inputs(layer, base)
        shapes.add_products(layer, base)
    return shapes.found


class _Shapes:
    """Builds `expected_shapes`."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec, self._hidden = spec, spec.hidden_size
        self._names = NAMES | dict(spec.renamed)
        self.found: dict[str, tuple[Shape, str, int, Shape]] = {}

    def add_outside_layers(self) -> None:
        spec, hidden = self._spec, self._hidden
        self._whole(EMBEDDING, "embed", spec.vocab_size, hidden)
        self._norm("model.norm", "norm")
        if not spec.tied:
            self._whole(HEAD, "lm_head", spec.vocab_size, hidden)
        if width := spec.token_width * spec.num_layers:
            self._whole("model.embed_tokens_per_layer.weight", TOKEN_EMBEDDING, spec.token_vocab, width)
            self._whole("model.per_layer_model_projection.weight", "token_model.weight", width, hidden)
            self._whole("model.per_layer_projection_norm.weight", "token_norm.weight", spec.token_width)
        for i in range(1, 0 if spec.streams is None else spec.streams.count):
            self._whole(f"model.altup_projections.{i - 1}.weight", f"streams_in.{i}.weight", hidden, hidden)
            self._whole(f"model.altup_unembed_projections.{i - 1}.weight", f"streams_out.{i}.weight", hidden, hidden)

    def add_norms(self, layer: int, base: str) -> None:
        """Add a layer's norms, sinks and scale."""
        spec = self._spec
        for place, name in spec.norms:
            self._norm(f"{base}.{name}", f"{layer}.{place}")
        if spec.qk_norm:
            dim = spec.heads_of(layer)[1]
            q_width, k_width = (spec.q_size, spec.kv_size) if spec.qk_norm_over_all else (dim, dim)
            self._whole(f"{base}.{self._names['q_norm']}.weight", f"{layer}.q_norm", q_width)
            if spec.kv_layer(layer) == layer:
                self._whole(f"{base}.{self._names['k_norm']}.weight", f"{layer}.k_norm", k_width)
        if spec.sinks:
            self._whole(f"{base}.self_attn.sinks", f"{layer}.sinks", spec.num_heads)
        if spec.latent is not None:
            self._whole(f"{base}.self_attn.kv_a_layernorm.weight", f"{layer}.kv_a_norm", spec.latent.rank)
            if spec.latent.query_rank:
                self._whole(f"{base}.self_attn.q_a_layernorm.weight", f"{layer}.q_a_norm", spec.latent.query_rank)
        if spec.layer_scale:
            self._whole(f"{base}.layer_scalar", f"{layer}.layer_scalar", 1)

    def add_inputs(self, layer: int, base: str) -> None:
        """Add a layer's inputs by token, and its part in several streams."""
        spec, hidden = self._spec, self._hidden
        if width := spec.token_width:
            self._whole(f"{base}.per_layer_input_gate.weight", f"{layer}.token_gate.weight", width, hidden)
            self._whole(f"{base}.per_layer_projection.weight", f"{layer}.token_projection.weight", hidden, width)
            self._whole(f"{base}.post_per_layer_input_norm.weight", f"{layer}.token_out.weight", hidden)
        if spec.streams is not None:
            count, rank = spec.streams.count, spec.streams.low_rank
            self._whole(f"{base}.altup.modality_router.weight", f"{layer}.streams_router.weight", count, hidden)
            self._whole(f"{base}.altup.router_norm.weight", f"{layer}.streams_norm.weight", hidden)
            self._whole(
                f"{base}.altup.prediction_coefs.weight", f"{layer}.streams_predict.weight", count * count, count
            )
            self._whole(f"{base}.altup.correction_coefs.weight", f"{layer}.streams_correct.weight", count, count)
            self._whole(f"{base}.altup.correct_output_scale", f"{layer}.streams_scale", hidden)
            self._whole(f"{base}.laurel.linear_left.weight", f"{layer}.laurel_left.weight", rank, hidden)
            self._whole(f"{base}.laurel.linear_right.weight", f"{layer}.laurel_right.weight", hidden, rank)
            self._whole(f"{base}.laurel.post_laurel_norm.weight", f"{layer}.laurel_norm.weight", hidden)

    def add_products(self, layer: int, base: str) -> None:
        """Add a layer's attention, and its MLP, its experts or both."""
        spec = self._spec
        products = _attention(spec, layer) if spec.latent is None else _latent_attention(spec, spec.latent)
        experts = spec.experts if spec.experts is not None and layer in spec.experts.layers else None
        if experts is not None:
            products += _experts(self._hidden, experts)
            if experts.routing is not None and experts.routing.sigmoid:
                bias = f"{base}.{experts.base}.{experts.router}.e_score_correction_bias"
                self._whole(bias, f"{layer}.router_correction", experts.count)
            if experts.beside:
                self._whole(f"{base}.router.scale", f"{layer}.router_scale", self._hidden)
                self._whole(f"{base}.router.per_expert_scale", f"{layer}.expert_scale", experts.count)
        if experts is None or experts.beside:
            products += _mlp(spec, layer)
        for target, parts, width, has_bias in products:
            start, total = 0, sum(rows for _, rows in parts)
            for part, rows in parts:
                name = f"{base}.{self._names.get(part, part)}"
                self.found[f"{name}.weight"] = ((rows, width), f"{layer}.{target}.weight", start, (total, width))
                if has_bias:
                    self.found[f"{name}.bias"] = ((rows,), f"{layer}.{target}.bias", start, (total,))
                start += rows

    def _whole(self, name: str, target: str, *shape: int) -> None:
        self.found[name] = (shape, target, 0, shape)

    def _norm(self, name: str, target: str) -> None:
        self._whole(f"{name}.weight", f"{target}.weight", self._hidden)
        if self._spec.norm_bias:
            self._whole(f"{name}.bias", f"{target}.bias", self._hidden)


def name_in(shapes: Mapping[str, object], stored: str) -> str | None:
    """Return the model's name of a stored tensor. A bare model (LlamaModel) is saved without the prefix `model.`; a
    language model inside another one has `language_model.` before or after it."""
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
