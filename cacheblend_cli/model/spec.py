"""Model shapes. `families` reads them from a HF `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# RoPE types whose factor lengthens the context. For llama3 and longrope `max_position_embeddings` is the longer one.
LENGTHENED = ("linear", "dynamic", "yarn")
LENGTH_DEPENDENT = ("dynamic", "longrope")  # their frequencies depend on the length of the prompt
QUERY_GROWTH = "llama_4_scaling_beta"  # among RoPE's parameters


def rotated_dim(rope: Mapping[str, Any], head_dim: int) -> int:
    """Channels of a head that this RoPE covers: of proportional RoPE all, though some do not turn."""
    share = None if rope["rope_type"] == "proportional" else rope.get("partial_rotary_factor")
    return int(head_dim * (share or 1))


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434): a token's K and V of all heads are made of one latent, and
    of one position key, which alone is rotated. These two are stored, not K and V.

    rank: size of the latent. nope_dim: of a head's key, the part made of the latent; the part that all heads share, the position
    key, is the spec's head_dim. value_dim: size of a head's value. query_rank: size of the latent that queries are made of, 0
    where they are made of the input.
    """

    rank: int
    nope_dim: int
    value_dim: int
    query_rank: int = 0


@dataclass(frozen=True)
class Routing:
    """Routing as in DeepSeek: first groups of experts, then experts in them (arXiv 2405.04434, section 2.1.1).

    sigmoid: scores by sigmoid and not by softmax, with a correction an expert that counts in the choice alone (arXiv 2408.15664);
    a group is then as good as its two best experts together, else as its best one. groups, groups_kept: how many there are, and
    how many of them a token's experts are in. factor: on the weights.
    """

    sigmoid: bool
    groups: int = 1
    groups_kept: int = 1
    factor: float = 1.0


@dataclass(frozen=True)
class ExpertsSpec:
    """MLPs of which a router chooses a few for each token. layers: those that have them, the others' MLPs are plain.

    width, shared_width: inside an expert, and inside the one that all tokens get (0: there is none). shared: what the checkpoint calls
    that one; shared_gate: it has a gate of its own. routing: None for the experts of the highest softmax.
    normed: the weights of a token's experts sum to 1. names: what the checkpoint calls gate, up and down of an expert, router:
    what chooses; base: where in a layer they are. bias: router and experts have biases.
    clamped: (alpha, limit) of a SwiGLU as gpt-oss has it, (up + 1) * gate * sigmoid(alpha * gate), where gate is at most
    limit and up within -limit and limit; None: the activation of the spec.
    beside: as Gemma 4 has them: the experts' output is added to that of the layer's MLP, each normed; the router norms its
    input, scales it by channel, and scales what it gives by expert. held: first of the experts that this
    rank has, and how many; None: all (see `parallel.Shard`).
    """

    count: int
    per_token: int
    width: int
    layers: tuple[int, ...]
    normed: bool = True
    shared_width: int = 0
    base: str = "mlp"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = "gate"
    bias: bool = False
    clamped: tuple[float, float] | None = None
    beside: bool = False
    shared: str = "shared_expert"
    shared_gate: bool = True
    routing: Routing | None = None
    held: tuple[int, int] | None = field(default=None, repr=False)  # no part of a model's fingerprint

    @property
    def on_rank(self) -> range:
        """Experts whose weights this rank has."""
        first, count = self.held or (0, self.count)
        return range(first, first + count)


@dataclass(frozen=True)
class LayerShapes:
    """Shapes of layers that differ from layer to layer; an entry a layer.

    kv_heads, head_dims: KV heads, and the size of a head. kv_layers: the layer whose K and V a layer attends to, itself where it
    has its own; those that use another layer's come last. mlp_widths: inside the MLP. values_of_keys: whether V is made of what
    K's projection gives, before its norm.
    """

    kv_heads: tuple[int, ...]
    head_dims: tuple[int, ...]
    kv_layers: tuple[int, ...]
    mlp_widths: tuple[int, ...]
    values_of_keys: tuple[bool, ...]

    def first(self, num_layers: int) -> LayerShapes:
        """The shapes of the first layers alone."""
        return LayerShapes(*(values[:num_layers] for values in vars(self).values()))


@dataclass(frozen=True)
class StreamsSpec:
    """Several residual streams (see `altup`). count: streams; active: the one that layers compute with; scaled: the active one is
    scaled by channel where a layer's input by token is added; low_rank: of the branch beside attention."""

    count: int
    active: int
    scaled: bool
    low_rank: int


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a decoder-only model. Sizes in elements; `sliding_windows` has an entry a layer (None: no window).

    rope: RoPE's parameters as transformers 5 has them in `rope_parameters`. local_rope: those of layers with a window, where
    they have others. unrotated: the layers that have no RoPE. tied: config.json says that the output head
    is the embedding (the weights may say otherwise, see `weights.load_weights`). config: config.json itself.

    What a Llama has not, each field at its default:
    - interleaved: RoPE turns channels 2i and 2i + 1, and not i and i + half (see `weights.fold`);
    - norms: which norms a layer has, and what the checkpoint calls them. attention_in and mlp_in: of what goes in,
      attention_out and mlp_out: of what is added to the residual stream;
    - parallel: the MLP gets the input of attention, or its own norm of it, and both are added at once;
    - layer_norm: norms take the mean out first; norm_bias: they add something; norm_offset: what is added to their weights;
    - qk_norm_over_all: the norm of q and k goes over all heads at once;
    - gated_mlp: false where an MLP is up, activation, down;
    - sinks: a logit a head that takes part in the softmax and has no value;
    - attention_scale: of the scores, null: head_dim ** -0.5; the soft caps: x becomes cap * tanh(x / cap);
    - embedding_scale, residual_scale, logit_scale: factors on the embedding, on what a layer adds, on the logits;
    - fused: qkv_proj and gate_up_proj, where the checkpoint holds them in one tensor as we do;
    - renamed: parts of a layer and their names in the checkpoint, where they are not a Llama's; outer: of `model.embed_tokens`,
      `model.layers`, `model.norm` and `model.embedding_norm`;
    - alibi: slopes of the heads, see `AttentionParams`; such a model has no RoPE;
    - embedding_norm: the embedding is normed, as the input of a layer is;
    - qkv_clip: q, k and v are cut to at most this, positive or negative;
    - qkv_by_group: the fused qkv_proj holds the query heads of a KV head, its k and its v, then those of the next;
    - experts: of a mixture;
    - other_parts: how the names of tensors begin that belong to other parts of a model, such as its eyes;
    - latent: of latent attention; num_kv_heads is then 1 and head_dim the size of the position key, which is what K is, and V is the
      latent;
    - shapes: of layers that differ; num_kv_heads and head_dim are then those of most layers;
    - v_norm: V's heads are normed, without a weight; layer_scale: a layer's output is multiplied by a number of its own;
    - token_width, token_vocab: numbers that every layer gets of a token by itself, of a second embedding with that vocabulary;
      0: there is none (see `token_input.TokenInputs`);
    - streams: of a model with several residual streams;
    - sparsity: for each layer the share of the gate's channels that are cut off, taking them for normally distributed (0: none);
    - generic: its layers are transformers' (see `generic`), and what says how a layer computes says nothing here."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: str
    rms_norm_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    max_position_embeddings: int
    sliding_windows: tuple[int | None, ...]
    rope: dict[str, Any]
    config: dict[str, Any]
    local_rope: dict[str, Any] | None = None
    unrotated: tuple[int, ...] = ()
    interleaved: bool = False
    norms: tuple[tuple[str, str], ...] = (
        ("attention_in", "input_layernorm"),
        ("mlp_in", "post_attention_layernorm"),
    )
    parallel: bool = False
    layer_norm: bool = False
    norm_bias: bool = False
    norm_offset: float = 0.0
    qk_norm_over_all: bool = False
    gated_mlp: bool = True
    sinks: bool = False
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    fused: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    outer: tuple[tuple[str, str], ...] = ()
    alibi: tuple[float, ...] | None = None
    embedding_norm: bool = False
    qkv_clip: float | None = None
    qkv_by_group: bool = False
    shapes: LayerShapes | None = None
    v_norm: bool = False
    layer_scale: bool = False
    token_width: int = 0
    token_vocab: int = 0
    streams: StreamsSpec | None = None
    sparsity: tuple[float, ...] = ()
    other_parts: tuple[str, ...] = ()
    experts: ExpertsSpec | None = None
    latent: LatentSpec | None = None
    generic: bool = False

    def rope_of(self, layer: int) -> dict[str, Any] | None:
        """RoPE parameters of a layer; None if it has no RoPE."""
        if layer in self.unrotated:
            return None
        local = self.local_rope if self.sliding_windows[layer] is not None else None
        return local or self.rope

    def heads_of(self, layer: int) -> tuple[int, int]:
        """(KV heads, head_dim) of a layer."""
        if self.shapes is None:
            return self.num_kv_heads, self.head_dim
        return self.shapes.kv_heads[layer], self.shapes.head_dims[layer]

    def mlp_width(self, layer: int) -> int:
        return self.intermediate_size if self.shapes is None else self.shapes.mlp_widths[layer]

    def kv_layer(self, layer: int) -> int:
        """The layer whose K and V this one attends to."""
        return layer if self.shapes is None else self.shapes.kv_layers[layer]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """A row of the residual stream, or of several."""
        return (self.hidden_size,) if self.streams is None else (self.streams.count, self.hidden_size)

    @property
    def num_kv_layers(self) -> int:
        """Layers with K and V of their own: the first ones."""
        return self.num_layers if self.shapes is None else len(set(self.shapes.kv_layers))

    @property
    def kv_shapes(self) -> tuple[tuple[int, ...], ...]:
        """(KV heads, head_dim) of each layer that has K and V of its own, and V's head_dim where it is not K's."""
        of_v = () if self.latent is None else (self.latent.rank,)
        return tuple((*self.heads_of(layer), *of_v) for layer in range(self.num_kv_layers))

    @property
    def query_growth(self) -> tuple[float, int] | None:
        """(beta, length): the query at position p is multiplied by 1 + beta log(1 + floor(p / length)); None: by nothing."""
        beta = self.rope.get(QUERY_GROWTH)
        return (beta, int(self.rope["original_max_position_embeddings"])) if beta else None

    @property
    def rotated_dim(self) -> int:
        """Channels of a head that RoPE rotates."""
        return rotated_dim(self.rope, self.head_dim)

    @property
    def q_size(self) -> int:
        """Numbers of a row's query, all heads."""
        return self.num_heads * (self.head_dim + (0 if self.latent is None else self.latent.nope_dim))

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def max_context(self) -> int:
        """Tokens of a prompt and its answer at most: what RoPE's scaling makes of `max_position_embeddings`.

        As vLLM computes it (`_get_and_verify_max_len` in vllm/config/model.py): a linear, dynamic or yarn factor lengthens
        the context, of yarn the one it was trained with; llama3 and longrope state the longer one. transformers means the
        same by `factor` (modeling_rope_utils.RopeParameters) and sets no limit itself. Its null factor for yarn is the
        ratio of `max_position_embeddings` to the original length.
        """
        factor = self.rope.get("factor")
        if self.rope["rope_type"] not in LENGTHENED or factor is None:
            return self.max_position_embeddings
        yarn = self.rope["rope_type"] == "yarn"
        return int(factor * (self.rope["original_max_position_embeddings"] if yarn else self.max_position_embeddings))

    def kv_bytes_per_token(self, bytes_per_element: float) -> float:
        """Bytes of K and V of one token over all layers."""
        return sum(heads * (dims[0] + dims[-1]) for heads, *dims in self.kv_shapes) * bytes_per_element

    @property
    def mlp_params(self) -> int:
        """Weights of a layer's MLP used per row; with experts, the mean over layers."""
        width = sum(map(self.mlp_width, range(self.num_layers))) / self.num_layers
        plain, experts = round((3 if self.gated_mlp else 2) * self.hidden_size * width), self.experts
        if experts is None:
            return plain
        of_row = 3 * self.hidden_size * (experts.per_token * experts.width + experts.shared_width)
        sparse = len(experts.layers) / self.num_layers
        dense = 1 if experts.beside else 1 - sparse
        return round(sparse * (of_row + experts.count * self.hidden_size) + dense * plain)
