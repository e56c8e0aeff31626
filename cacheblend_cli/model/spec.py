"""Model shapes. `families` reads them from a HF `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# RoPE types whose factor lengthens the context. For llama3 and longrope `max_position_embeddings` is the longer one.
LENGTHENED = ("linear", "dynamic", "yarn")
LENGTH_DEPENDENT = ("dynamic", "longrope")  # frequencies depend on the prompt length
QUERY_GROWTH = "llama_4_scaling_beta"  # one of RoPE's parameters


def rotated_dim(rope: Mapping[str, Any], head_dim: int) -> int:
    """Return the channels of a head that this RoPE covers. Proportional RoPE covers all, though some do not rotate."""
    share = None if rope["rope_type"] == "proportional" else rope.get("partial_rotary_factor")
    return int(head_dim * (share or 1))


def original_length(rope: Mapping[str, Any], max_positions: int) -> int:
    """Return the longest prompt length that uses the RoPE frequencies of short prompts."""
    return int(rope["original_max_position_embeddings"] if rope["rope_type"] == "longrope" else max_positions)


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434): the K and V of all heads are computed from one
    latent per token. All heads share one position key, the only part that RoPE rotates. Latent and position key are
    stored instead of K and V."""

    rank: int  # size of the latent
    nope_dim: int  # part of a head's key that the latent makes; the shared position key has the spec's head_dim
    value_dim: int  # size of a head's value
    query_rank: int = 0  # size of the latent that makes the queries; 0: they are projected from the input


@dataclass(frozen=True)
class Routing:
    """DeepSeek's routing: first groups of experts, then experts within them (arXiv 2405.04434, section 2.1.1)."""

    # Scores by sigmoid instead of softmax, with a correction per expert that only affects the choice (arXiv
    # 2408.15664). A group's score is then the sum of its two best experts, else its best expert's score.
    sigmoid: bool
    groups: int = 1
    groups_kept: int = 1  # groups that a token's experts come from
    factor: float = 1.0  # on the experts' weights


@dataclass(frozen=True)
class ExpertsSpec:
    """MLPs; a router chooses a few of them per token."""

    count: int
    per_token: int
    width: int  # width of an expert
    layers: tuple[int, ...]  # layers with experts; other layers have a plain MLP
    normed: bool = True  # the weights of a token's experts sum to 1
    shared_width: int = 0  # width of the shared expert, which every token gets; 0: none
    base: str = "mlp"  # module with the experts, in the checkpoint
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # in the checkpoint
    router: str = "gate"  # in the checkpoint
    bias: bool = False  # router and experts have biases
    # (alpha, limit) of gpt-oss's SwiGLU, (up + 1) * gate * sigmoid(alpha * gate), gate at most limit, up within
    # +-limit. None: the activation of the spec.
    clamped: tuple[float, float] | None = None
    # Gemma 4: the experts' output is added to the MLP's, each normed; the router norms its input, scales it per
    # channel, and scales its weights per expert.
    beside: bool = False
    shared: str = "shared_expert"  # in the checkpoint
    shared_gate: bool = True  # the shared expert has a gate
    routing: Routing | None = None  # None: the experts with the highest softmax
    # (first, count) of the experts on this rank, None = all (`parallel.Shard`). Not part of the fingerprint.
    held: tuple[int, int] | None = field(default=None, repr=False)

    @property
    def on_rank(self) -> range:
        """Experts whose weights this rank has."""
        first, count = self.held or (0, self.count)
        return range(first, first + count)


@dataclass(frozen=True)
class LayerShapes:
    """Shapes of layers that differ from layer to layer; an entry per layer."""

    kv_heads: tuple[int, ...]
    head_dims: tuple[int, ...]
    kv_layers: tuple[int, ...]  # the layer whose K and V a layer attends to; layers that use another's come last
    mlp_widths: tuple[int, ...]
    values_of_keys: tuple[bool, ...]  # V is made from the output of K's projection, before its norm

    def first(self, num_layers: int) -> LayerShapes:
        return LayerShapes(*(values[:num_layers] for values in vars(self).values()))


@dataclass(frozen=True)
class StreamsSpec:
    """Several residual streams (see `altup`)."""

    count: int
    active: int  # the stream that layers compute with
    scaled: bool  # the active stream is scaled per channel where a layer's input by token is added
    low_rank: int  # rank of the branch beside attention


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a decoder-only model. Sizes in elements. Fields without a default describe a Llama; others are
    features beyond Llama."""

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
    tied: bool  # the output head is the embedding, by config.json; the weights may differ (`weights.load_weights`)
    max_position_embeddings: int
    sliding_windows: tuple[int | None, ...]  # per layer; None: no window
    rope: dict[str, Any]  # parameters as in transformers 5's `rope_parameters`
    config: dict[str, Any]  # config.json

    # RoPE and positions
    local_rope: dict[str, Any] | None = None  # for layers with a window, if it differs
    unrotated: tuple[int, ...] = ()  # layers without RoPE
    interleaved: bool = False  # RoPE rotates channels 2i and 2i + 1 instead of i and i + half (`weights.fold`)

    # attention
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_soft_cap: float | None = None  # x becomes cap * tanh(x / cap)
    sinks: bool = False  # an extra logit per head in the softmax, without a value
    qk_norm_over_all: bool = False  # the norm of q and k covers all heads at once
    v_norm: bool = False  # V's heads are normed, without a weight
    latent: LatentSpec | None = None  # num_kv_heads is then 1; K is the position key of head_dim, V the latent

    # norms

    # (norm, name in the checkpoint). attention_in and mlp_in norm the input, attention_out and mlp_out the output that
    # is added to the residual stream.
    norms: tuple[tuple[str, str], ...] = (("attention_in", "input_layernorm"), ("mlp_in", "post_attention_layernorm"))
    layer_norm: bool = False  # norms subtract the mean first
    norm_bias: bool = False
    norm_offset: float = 0.0  # added to the norms' weights

    # MLP
    parallel: bool = False  # the MLP gets attention's input, or its own norm of it; both outputs are added at once
    gated_mlp: bool = True  # False: up, activation, down
    # Per layer, share of the gate's channels that are cut off, taking them for normally distributed; 0: none.
    sparsity: tuple[float, ...] = ()
    experts: ExpertsSpec | None = None

    # embedding and output
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # on each layer's output
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    # Size and vocabulary of a second embedding, which gives each layer an input by token (`token_input.TokenInputs`);
    # 0: none.
    token_width: int = 0
    token_vocab: int = 0

    # per layer
    shapes: LayerShapes | None = None  # if layers differ; num_kv_heads and head_dim are then the most common ones
    layer_scale: bool = False  # a layer's output is multiplied by a learned factor
    streams: StreamsSpec | None = None

    # the checkpoint
    fused: tuple[str, ...] = ()  # qkv_proj and gate_up_proj, where the checkpoint holds them fused
    renamed: tuple[tuple[str, str], ...] = ()  # (part of a layer, name in the checkpoint), if it is not Llama's
    other_parts: tuple[str, ...] = ()  # prefixes of tensors of other parts of a model, such as its vision tower

    # transformers' own layers (`generic`): fields that describe the computation are unused
    generic: bool = False
    # Hybrids: numbers of layers with a recurrent state before each of the layers, all of which have K and V, and after
    # the last (`generic.recurrent`). Empty for other models.
    recurrent: tuple[int, ...] = ()

    def rope_of(self, layer: int) -> dict[str, Any] | None:
        """Return the RoPE parameters of a layer, None if it has no RoPE."""
        if layer in self.unrotated:
            return None
        local = self.local_rope if self.sliding_windows[layer] is not None else None
        return local or self.rope

    def heads_of(self, layer: int) -> tuple[int, int]:
        """Return (KV heads, head_dim) of a layer."""
        if self.shapes is None:
            return self.num_kv_heads, self.head_dim
        return self.shapes.kv_heads[layer], self.shapes.head_dims[layer]

    def mlp_width(self, layer: int) -> int:
        return self.intermediate_size if self.shapes is None else self.shapes.mlp_widths[layer]

    def kv_layer(self, layer: int) -> int:
        """Return the layer whose K and V this one attends to."""
        return layer if self.shapes is None else self.shapes.kv_layers[layer]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a row of the residual stream or streams."""
        return (self.hidden_size,) if self.streams is None else (self.streams.count, self.hidden_size)

    @property
    def num_kv_layers(self) -> int:
        """Number of layers with K and V of their own, which come first."""
        return self.num_layers if self.shapes is None else len(set(self.shapes.kv_layers))

    @property
    def kv_shapes(self) -> tuple[tuple[int, ...], ...]:
        """(KV heads, head_dim) of each layer with own K and V, then V's head_dim if it differs from K's."""
        of_v = () if self.latent is None else (self.latent.rank,)
        return tuple((*self.heads_of(layer), *of_v) for layer in range(self.num_kv_layers))

    @property
    def query_growth(self) -> tuple[float, int] | None:
        """(beta, length): the query at position p is multiplied by 1 + beta log(1 + floor(p / length)); or None."""
        beta = self.rope.get(QUERY_GROWTH)
        return (beta, int(self.rope["original_max_position_embeddings"])) if beta else None

    @property
    def rope_switches_at(self) -> int | None:
        """Number of tokens up to which the frequencies of RoPE are the same; None: always."""
        ropes = [rope for layer in range(self.num_layers) if (rope := self.rope_of(layer)) is not None]
        changing = [rope for rope in ropes if rope["rope_type"] in LENGTH_DEPENDENT]
        return min((original_length(rope, self.max_position_embeddings) for rope in changing), default=None)

    @property
    def rotated_dim(self) -> int:
        """Channels of a head that RoPE rotates."""
        return rotated_dim(self.rope, self.head_dim)

    @property
    def q_size(self) -> int:
        """Elements of a row's query over all heads."""
        return self.num_heads * (self.head_dim + (0 if self.latent is None else self.latent.nope_dim))

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def max_context(self) -> int:
        """Maximum tokens of a prompt and its answer: `max_position_embeddings` after RoPE's scaling.

        Computed as in vLLM (`_get_and_verify_max_len` in vllm/config/model.py): a linear, dynamic or yarn factor
        lengthens the context (for yarn the original one); for llama3 and longrope it is the longer one already.
        transformers defines `factor` in the same way (modeling_rope_utils.RopeParameters) and sets no limit itself. Its
        null factor for yarn is the ratio of `max_position_embeddings` to the original length.
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
