"""Spec of a model without a file in `families`, from config.json read by transformers' own class."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families.reader import LAYER_TYPES
from cacheblend_cli.model.families.refusals import HYBRIDS
from cacheblend_cli.model.families.rope_fields import KINDS, rope_parameters
from cacheblend_cli.model.families.values import LARGEST, LARGEST_INTEGER, shown, wrong_value
from cacheblend_cli.model.model_files import AGAIN
from cacheblend_cli.model.spec import LENGTH_DEPENDENT, ModelSpec

CHOOSING = ("indexer", "index_topk", "index_n_heads", "index_local", "sparse_att", "sparse_block", "compress_r", "logn")
"""Parts of field names of models whose layers compute differently for long prompts."""
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
LAYER_COUNT = re.compile(r"(n|num)(_\w+)?_layers?|(decoder|encoder)_layers")
SIZE = re.compile(r"size|dim|width|rank|head|expert|position|length|n_embd|d_model")


def generic_spec(config: dict[str, Any], named: list[str]) -> ModelSpec | None:
    """Return the spec as far as the config determines it (`measure` finds the rest on the loaded model), None if
    transformers has no such decoder. named: architectures of the config. Raises UsageError. Imports transformers."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = config["model_type"]
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if architecture is None:
        return None
    if named and architecture not in named:
        raise UsageError(f"unknown architecture {named} of model_type {model_type!r}", f"known: {architecture}")
    _check_sizes(config)
    try:
        with quiet():
            read = CONFIG_MAPPING[model_type].from_dict(json.loads(json.dumps(config), object_hook=_float))
            values, is_inside = read.to_dict(), read.get_text_config() is not read
    except (TypeError, ValueError, AttributeError, LookupError, StrictDataclassError) as error:
        detail = " ".join(str(error).split())
        raise UsageError(
            f"transformers cannot read config.json of model_type {model_type!r}: {detail}", AGAIN
        ) from error
    if config.get("quantization_config"):
        raise not_generic(model_type, "its weights are quantised")
    if is_inside:
        raise not_generic(model_type, "it is a language model inside another one")
    if getattr(read, "is_encoder_decoder", False):
        raise not_generic(model_type, "its decoder attends to an encoder (cross attention)")
    choosing = [n for n, v in values.items() if v and any(part in n for part in CHOOSING)]
    if choosing:
        raise not_generic(model_type, f"its layers choose which keys they see ({choosing[0]} in its config)")
    if values.get("kv_lora_rank"):
        raise not_generic(model_type, "it keeps K and V as a latent vector (MLA)")
    kinds = values.get("layer_types")
    others = sorted(set(map(str, kinds)) - LAYER_TYPES.keys()) if isinstance(kinds, list) else []
    if model_type not in HYBRIDS and others:
        raise not_generic(model_type, f"some of its layers are not attention ({others[0]})")
    if model_type not in HYBRIDS and not getattr(transformers, architecture)._supports_attention_backend:
        raise not_generic(model_type, "its attention does not go through AttentionInterface")
    return _spec(model_type, architecture, read, config)


def _float(value: dict[str, Any]) -> Any:
    """Return the number that transformers writes as an object, such as {"__float__": "Infinity"}."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def _check_sizes(config: dict[str, Any]) -> None:
    """Raise UsageError for impossible numbers: transformers' classes build lists as long as the number of layers."""
    for name, value in config.items():
        most = LARGEST["num_hidden_layers"] if LAYER_COUNT.fullmatch(name) else LARGEST_INTEGER
        if isinstance(value, int) and value > most and (most < LARGEST_INTEGER or SIZE.search(name)):
            raise wrong_value(name, value, f"{most} or less")


def _spec(model_type: str, architecture: str, read: Any, config: dict[str, Any]) -> ModelSpec:
    for name in SIZES:
        value = getattr(read, name, None)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise not_generic(model_type, f"{name} in its config is missing or not a number of 1 or more")
    recurrent, heads = _recurrent(model_type, read), read.num_attention_heads
    layers = read.num_hidden_layers - sum(recurrent)
    head_dim = getattr(read, "head_dim", None) or read.hidden_size // heads
    rope, local = _ropes(model_type, read, read.max_position_embeddings, head_dim)
    width = getattr(read, "intermediate_size", None)
    return ModelSpec(
        architecture=architecture,
        vocab_size=read.vocab_size,
        hidden_size=read.hidden_size,
        intermediate_size=width if isinstance(width, int) else 4 * read.hidden_size,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=getattr(read, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        activation="transformers",
        rms_norm_eps=0.0,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tied=bool(getattr(read, "tie_word_embeddings", False)),
        max_position_embeddings=read.max_position_embeddings,
        sliding_windows=(None,) * layers,
        rope=rope,
        local_rope=local,
        config=config,
        generic=True,
        recurrent=recurrent,
    )


def _recurrent(model_type: str, read: Any) -> tuple[int, ...]:
    if model_type not in HYBRIDS:
        return ()
    kinds = [str(kind) for kind in getattr(read, "layer_types", None) or ()]
    with_kv = [i for i, kind in enumerate(kinds) if kind in LAYER_TYPES]
    if not with_kv or len(kinds) != read.num_hidden_layers:
        raise not_generic(model_type, "none of its layers has K and V")
    starts, ends = [0, *(i + 1 for i in with_kv)], [*with_kv, len(kinds)]
    counts = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return counts if any(counts) else ()


def _ropes(model_type: str, read: Any, length: int, head_dim: int) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return RoPE's parameters, and those of layers with a window if they differ."""
    given = getattr(read, "rope_parameters", None)
    if given is None and model_type in HYBRIDS:  # its layers with attention have no RoPE
        given = {"rope_type": "default", "rope_theta": 10000.0}
    if not isinstance(given, dict) or not given:
        raise not_generic(model_type, "its config has no rope_parameters: K and V of other positions cannot be moved")
    by_kind = [given[kind] for kind in KINDS if kind in given]
    nested = any(isinstance(value, dict) for value in given.values())
    if nested and (len(by_kind) != len(given) or not all(isinstance(one, dict) for one in by_kind)):
        raise not_generic(model_type, f"its layers have unknown kinds of RoPE: {shown(sorted(given))}")
    found = []
    for one in by_kind if nested else [given]:
        # of images, whose positions have three parts; a text's are equal
        one = {name: value for name, value in one.items() if name not in ("mrope_section", "mrope_interleaved")}
        found.append(rope_parameters({"rope_parameters": one}, length, head_dim, {"partial_rotary_factor": 1.0}))
        if found[-1]["rope_type"] in LENGTH_DEPENDENT:
            raise not_generic(model_type, f"its RoPE of type {found[-1]['rope_type']!r} depends on the prompt's length")
    return found[0], found[1] if len(found) > 1 else None


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' warnings and progress bars, and restore them afterwards."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def not_generic(model_type: object, reason: str) -> UsageError:
    """Return the error. reason: the missing or unsupported feature, as the end of a sentence."""
    return UsageError(
        f"model_type {model_type!r} has no implementation of its own here, and cannot run on transformers' layers: {reason}",
        "use another model: cacheblend models ls, cacheblend init",
    )
