"""Phi-3, 3.5 and 4: a Llama with fused q, k, v and fused gate and up, and longrope over a part of the head."""

from __future__ import annotations

from dataclasses import replace

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families.reader import ConfigFields, Family, plain_decoder
from cacheblend_cli.model.families.values import shown
from cacheblend_cli.model.spec import ModelSpec

MISSING = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0}


def read(fields: ConfigFields) -> ModelSpec:
    spec = plain_decoder(ConfigFields({"original_max_position_embeddings": 4096} | fields.values), MISSING)
    if spec.rope["rope_type"] not in ("default", "longrope"):
        raise UsageError(f"RoPE of a phi3 is of type {shown(spec.rope['rope_type'])}", "known: default, longrope")
    windows = (fields.optional_integer("sliding_window", None),) * spec.num_layers
    return replace(spec, sliding_windows=windows, fused=("qkv_proj", "gate_up_proj"))


PHI3 = Family("phi3", ("Phi3ForCausalLM", "Phi3Model"), ("sliding_window", "resid_pdrop", "embd_pdrop"), read)
