"""Any JSON in config.json gives a spec whose RoPE can be computed, or an error message, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.families import FAMILIES, read_spec, spec_from_config
from cacheblend_cli.model.families.quantisation import FIELD
from cacheblend_cli.model.families.reader import OTHER_FIELDS, SHAPE_FIELDS
from cacheblend_cli.model.families.refusals import OTHER_QUANTISATION, REFUSED
from cacheblend_cli.model.families.rope_fields import FACTORS, NEEDED, NUMBERS, OTHERS
from cacheblend_cli.model.rope import LayerRotations

BASE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip
NAMES = sorted(
    {
        *SHAPE_FIELDS,
        *OTHER_FIELDS,
        FIELD,
        *OTHER_QUANTISATION,
        *REFUSED,
        *(n for f in FAMILIES.values() for n in f.fields),
    }
)
SCALARS = st.none() | st.booleans() | st.integers(-2, 300) | st.floats() | st.sampled_from(["", "silu", "1e-5", "yarn"])
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
)
PLAUSIBLE = st.integers(1, 300) | st.floats(0.01, 1e6)
NUMBER = PLAUSIBLE | PLAUSIBLE | PLAUSIBLE | JSON
FACTOR_LIST = st.lists(PLAUSIBLE, min_size=4, max_size=4) | st.lists(NUMBER, min_size=3, max_size=4)
ROPE = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(sorted(NEEDED))},
    optional={
        **dict.fromkeys(NUMBERS, NUMBER),
        **dict.fromkeys(FACTORS, FACTOR_LIST),
        **dict.fromkeys((*OTHERS[1:], "mrope_section"), JSON),
        "partial_rotary_factor": st.sampled_from([1, 1.0, None, 0.5]),
    },
)
DEFAULTS = {
    "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
}  # fmt: skip


def read(config: dict[str, Any]) -> None:
    try:
        spec = spec_from_config(json.loads(json.dumps(config)))
        tables = LayerRotations(spec, torch.device("cpu")).tables(min(64, spec.max_context))
    except UsageError:
        return
    assert spec.max_context >= 1
    assert all(bool(cos.isfinite().all() and sin.isfinite().all()) for cos, sin in tables)


@given(st.sampled_from(sorted(FAMILIES)), st.dictionaries(st.sampled_from(NAMES), JSON, max_size=2))
def test_fields_of_any_type(name: str, fields: dict[str, Any]) -> None:
    read({"model_type": name, **BASE, **fields})


@given(st.sampled_from(["rope_parameters", "rope_scaling"]), ROPE, st.none() | st.integers(1, 300) | SCALARS)
@example("rope_parameters", {"rope_type": "yarn"}, 0.125)
def test_rope_of_any_kind(field: str, rope: dict[str, Any], original: Any) -> None:
    read({"model_type": "llama", **BASE, field: DEFAULTS | rope, "original_max_position_embeddings": original})


@pytest.mark.parametrize("text", ["null", "3", '"llama"', "[{}]", "", "{", "\ufeff{}", '{"model_type": NaN}'])
def test_a_file_that_is_no_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError):
        read_spec(tmp_path)


@pytest.mark.parametrize("name", ["llama", "phi", "mistral3"])
def test_architectures_that_are_no_list_of_names(name: str) -> None:
    with pytest.raises(UsageError, match="must be a list of names"):
        spec_from_config({"model_type": name, "architectures": 1, **BASE})
