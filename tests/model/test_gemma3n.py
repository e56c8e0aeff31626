"""Gemma 3n: the text half of the whole model's checkpoint, tokens that the second embedding has not, and its speed."""

from __future__ import annotations

import json
from pathlib import Path

import hub_families
import pytest
import torch
from cacheblend_kernels import compiled
from cacheblend_kernels.torch_backend import TorchBackend
from hub_families import newer_names
from hub_models import tensors

from cacheblend_cli.blend.speeds import measure_compute
from cacheblend_cli.model.decoder import Decoder
from cacheblend_cli.model.families import read_spec
from cacheblend_cli.model.spec import ModelSpec
from cacheblend_cli.model.weights import load_weights


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma3n") / "text"
    next(model for model in hub_families.RUN if model.name == "gemma-3n-e4b").write(path)
    return path


def shape(spec: ModelSpec) -> dict[str, object]:
    return {name: value for name, value in vars(spec).items() if name not in ("architecture", "config", "other_parts")}


def test_the_whole_models_text_half_is_the_text_model(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers needs timm for the whole model, so its files are made of the text model's."""
    path = tmp_path / "whole"
    path.mkdir()
    for file in text.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    inner = json.loads((text / "config.json").read_text())
    inner.pop("architectures")
    outer = {
        "model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"], "text_config": inner,
        "vision_config": {"model_type": "gemma3n_vision"}, "audio_config": {"model_type": "gemma3n_audio"},
        "audio_soft_tokens_per_image": 188, "vision_soft_tokens_per_image": 256, "boi_token_id": 255999,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(outer))
    others = (
        "vision_tower.timm_model.conv_stem.conv.weight",
        "audio_tower.conformer.0.ffw.weight",
        "embed_vision.x.weight",
    )
    tensors(newer_names)(path)
    tensors(lambda held: held.update({f"model.{name}": torch.ones(2) for name in others}))(path)
    whole, alone = read_spec(path), read_spec(text)
    assert shape(whole) == shape(alone)
    cpu = torch.device("cpu")
    monkeypatch.setattr(compiled, "multiplies", lambda dtype: False)  # copies
    ours, theirs = (load_weights(spec, p, torch.float32, cpu) for spec, p in ((whole, path), (alone, text)))
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours.pop(name), theirs.pop(name)) for name in list(ours))


def test_a_token_without_a_row_in_the_second_embedding_gets_the_first_row(text: Path) -> None:
    """The main vocabulary is larger by the tokens of pictures and sounds."""
    spec = read_spec(text)
    weights = load_weights(spec, text, torch.float32, torch.device("cpu"))
    weights["token_embed"] = weights["token_embed"][:300]
    inputs = Decoder(spec, weights, TorchBackend(), torch.float32).layers[1].token_inputs
    assert inputs is not None
    weights_of_first, embed = inputs.of_layer(torch.tensor([0]), 1), inputs._embed
    inputs._embed = lambda ids: embed(torch.zeros_like(ids))  # the main embedding aside
    torch.testing.assert_close(inputs.of_layer(torch.tensor([310]), 1), weights_of_first)


def test_its_speed_can_be_measured(text: Path) -> None:
    """--ratio auto times a copy of the first layers, and the head behind all streams."""
    spec = read_spec(text)
    decoder = Decoder(spec, load_weights(spec, text, torch.float32, torch.device("cpu")), TorchBackend(), torch.float32)
    speeds = measure_compute(decoder, 16, seconds=0.05)
    assert min(speeds.row_s, speeds.head_s, speeds.moved_s) > 0
