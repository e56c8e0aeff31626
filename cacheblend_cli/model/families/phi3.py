"""Phi-3, 3.5 and 4: a Llama whose q, k, v and whose gate and up are one tensor each, with longrope over a part of the head."""

from __future__ import annotations

from dataclasses import replace

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families.reader import ConfigFields, Family, plain_decoder
from cacheblend_cli.model.families.values import shown
from cacheblend_cli.model.spec import ModelSpec

FIELDS = {
    "sliding_window": "how many tokens a layer looks back over, itself included; null: all",
    "resid_pdrop": "training",
    "embd_pdrop": "training",
}
MISSING = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0}


def read(fields: ConfigFields) -> ModelSpec:
    values = {"original_max_position_embeddings": 4096} | fields.values
    spec = plain_decoder(ConfigFields(values), PHI3.architectures[0], MISSING)
    if spec.rope["rope_type"] not in ("default", "longrope"):
        raise UsageError(f"RoPE of a phi3 is of type {shown(spec.rope['rope_type'])}", "known: default, longrope")
    windows = (fields.optional_integer("sliding_window", None),) * spec.num_layers
    return replace(spec, sliding_windows=windows, fused=("qkv_proj", "gate_up_proj"), config=fields.values)


PHI3 = Family("phi3", ("Phi3ForCausalLM", "Phi3Model"), FIELDS, read)
