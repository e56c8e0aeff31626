"""Hybrids: what their configs say, and what makes layers that are not attention safe. Their answers are in
tests/engine/test_hybrids.py."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import hub_hybrids
import pytest
import torch
from hub_models import HubModel
from transformers import NemotronHConfig

from cacheblend_cli.errors import UsageError
from cacheblend_cli.kv.generic_check import check_generic
from cacheblend_cli.model.description import Precision
from cacheblend_cli.model.families import spec_from_config
from cacheblend_cli.model.generic.decoder import GenericDecoder
from cacheblend_cli.model.generic.recurrent import _Held
from cacheblend_cli.model.loading import load_model
from cacheblend_cli.model.states import LaunchStates, StateLayout

LINEAR, FULL = "linear_attention", "full_attention"


def loaded(path: Path, dtype: str = "float32") -> GenericDecoder:
    decoder = load_model(path, "m", torch.device("cpu"), Precision(dtype), "torch").decoder
    assert isinstance(decoder, GenericDecoder)
    return decoder


def config(**changed: Any) -> dict[str, Any]:
    shape = {"vocab_size": 320, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 512}
    return {"model_type": "qwen3_5_text"} | hub_hybrids.DELTA | shape | changed


def test_layers_without_kv_are_counted_between_those_with_it() -> None:
    assert spec_from_config(config()).recurrent == (3, 3, 0)
    types = [FULL, LINEAR, LINEAR, FULL, LINEAR]
    spec = spec_from_config(config(num_hidden_layers=5, layer_types=types))
    assert (spec.recurrent, spec.num_layers, spec.num_kv_layers) == ((0, 2, 1), 2, 2)
    assert spec_from_config(config(num_hidden_layers=2, layer_types=[FULL, FULL])).recurrent == ()


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(UsageError, match="none of its layers has K and V"):
        spec_from_config(config(num_hidden_layers=2, layer_types=[LINEAR, LINEAR]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("model", hub_hybrids.RUN, ids=lambda model: model.name)
def test_hybrids_pass_their_check_in_16_bits(model: HubModel, tmp_path: Path, dtype: str) -> None:
    model.write(tmp_path / "m")
    decoder = loaded(tmp_path / "m", dtype)
    check_generic(decoder)
    assert decoder.state_layout is not None
    assert decoder.state_layout.num_layers == len(decoder.recurrent_modules) == sum(decoder.spec.recurrent)


def later_rows(rows: torch.Tensor) -> torch.Tensor:
    return rows + rows.roll(-1, dims=1)


def test_a_recurrent_layer_that_sees_later_rows_is_refused(tmp_path: Path) -> None:
    hub_hybrids.QWEN.write(tmp_path / "m")
    decoder = loaded(tmp_path / "m")
    check_generic(decoder)
    mlp: Any = decoder.parts.model.model.layers[1].mlp
    mlp.register_forward_hook(lambda module, given, output: later_rows(output))
    with pytest.raises(UsageError, match="layer 1, which is not attention"):
        check_generic(decoder)


def test_states_survive_their_bytes(tmp_path: Path) -> None:
    """In the compute dtype and in float32, and layers without a state between."""
    model = next(m for m in hub_hybrids.RUN if m.config is NemotronHConfig)
    model.write(tmp_path / "m")
    decoder = loaded(tmp_path / "m", "bfloat16")
    layout = decoder.state_layout
    assert layout is not None
    launch, hidden = LaunchStates([5], [layout.initial]), torch.randn(5, 32, dtype=torch.bfloat16)
    with torch.inference_mode():
        for layer in decoder.layers:
            assert layer.before is not None
            hidden = layer.before(hidden, launch)
    [state] = launch.final()
    assert StateLayout.of(state) == layout
    assert {dtype for dtype, _ in layout.stored} == {"BF16", "F32"}
    data = layout.to_bytes(state)
    assert sum(map(len, data)) == layout.num_bytes
    again = layout.from_bytes([memoryview(bytearray(part)) for part in data], torch.device("cpu"))
    assert [sorted(layer) for layer in again] == [sorted(layer) for layer in state]
    for ours, theirs in zip(again, state, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_config_as_nvidia_writes_it(tmp_path: Path) -> None:
    """A pattern of layers, a file that its class came from, and infinity as transformers writes it."""
    model = next(m for m in hub_hybrids.RUN if m.config is NemotronHConfig)
    model.write(tmp_path / "m")
    written = json.loads((tmp_path / "m" / "config.json").read_text())
    assert written["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    del written["layers_block_type"]
    written |= {"hybrid_override_pattern": "M-*ME*", "auto_map": {"AutoModelForCausalLM": "m.NemotronHForCausalLM"}}
    (tmp_path / "m" / "config.json").write_text(json.dumps(written))
    assert loaded(tmp_path / "m").spec.recurrent == (2, 2, 0)
    written["auto_map"] = {"AutoModelForCausalLM": "m.AnotherForCausalLM"}
    (tmp_path / "m" / "config.json").write_text(json.dumps(written))
    with pytest.raises(UsageError, match="needs its own code"):
        loaded(tmp_path / "m")


def test_states_are_read_as_transformers_5_20_reads_them() -> None:
    """Where modules take attributes of the cache's layers."""
    held = _Held({"conv0": torch.ones(1, 2, 3), "recurrent0": torch.zeros(1, 4)})
    layer = held.layers[7]
    assert not layer.record_past
    assert torch.equal(layer.conv_states[0], torch.ones(1, 2, 3))
    assert torch.equal(layer.recurrent_states[0], torch.zeros(1, 4))
    assert held.has_previous_state(7)
    assert not _Held({}).has_previous_state(7)
    assert _Held({}).layers[7].conv_states == [None]


def test_a_layer_s_states_are_freed_at_once() -> None:
    """Not with the next garbage collection: they take megabytes, in each layer and step."""
    held = _Held({"conv0": torch.ones(1, 2, 3)})
    assert held.layers[3].conv_states
    gone = weakref.ref(held)
    del held
    assert gone() is None
