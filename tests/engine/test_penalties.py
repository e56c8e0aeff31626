"""Penalties, a model's own sampling settings, and the end of an answer, compared with transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.request.model_sampling import as_the_model, model_sampling
from cacheblend_cli.engine.worker import sampling
from cacheblend_cli.engine.worker.sampling import Draw, Penalties, Sampler, draw_together, filtered_probs
from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.loading import LoadedModel
from cacheblend_cli.settings import Settings, resolve
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams, model_sampled, sampling_of

VOCAB = 12
IDS = st.lists(st.integers(0, VOCAB - 1), max_size=8)
CPU = torch.device("cpu")


def penalised(params: SamplingParams, prompt: list[int], said: list[int], logits: torch.Tensor) -> torch.Tensor:
    penalties = Penalties(params, prompt)
    for token in said:
        penalties.applied(logits)
        penalties.note(torch.tensor([token]))
    return penalties.applied(logits)


@given(
    IDS, IDS, st.floats(0.5, 2.5), st.floats(0.2, 2.0), st.integers(1, VOCAB), st.floats(0.1, 1.0), st.integers(0, 99)
)
def test_the_repetition_penalty_and_the_filters_are_those_of_transformers(
    prompt: list[int], said: list[int], penalty: float, temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    theirs = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(penalty),
            TemperatureLogitsWarper(temperature),
            TopKLogitsWarper(top_k),
            TopPLogitsWarper(top_p),
        ]
    )
    ids = torch.tensor([prompt + said], dtype=torch.int64)
    expected = torch.softmax(theirs(ids, logits[None].clone())[0], -1)
    params = SamplingParams(repetition_penalty=penalty, temperature=temperature, top_k=top_k, top_p=top_p)
    ours = filtered_probs(penalised(params, prompt, said, logits), params)
    torch.testing.assert_close(ours / ours.sum(), expected, atol=1e-6, rtol=1e-5)


def test_settings_are_uploaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through `upload`, which waits for nothing: a tensor made of values on a GPU would wait."""
    uploads, tensor, upload = list[Any](), torch.tensor, sampling.upload
    monkeypatch.setattr(sampling, "upload", lambda *given: (uploads.append(given[0]), upload(*given))[1])

    def on_the_host(*given: Any, **about: Any) -> torch.Tensor:
        assert "device" not in about
        return tensor(*given, **about)

    monkeypatch.setattr(torch, "tensor", on_the_host)
    params = SamplingParams(repetition_penalty=1.5, logit_bias=((3, 2.0), (5, -1.0)))
    sampler = Sampler(params, CPU, [1, 4])
    for _ in range(5):
        draw_together([sampler], torch.linspace(-3, 3, VOCAB)[None], [None])
    assert uploads == [[1, 4], (3, 5), (2.0, -1.0)]
    unknown = Sampler(SamplingParams(logit_bias=((VOCAB, 1.0),)), CPU)
    found, drawn = draw_together([unknown, Sampler(SamplingParams(), CPU)], torch.zeros(2, VOCAB), [None, None])
    assert isinstance(found, UsageError), "in place of the draw of this one alone"
    assert isinstance(drawn, Draw)


@given(IDS, IDS, st.floats(-2, 2), st.floats(-2, 2))
def test_presence_and_frequency_count_the_answer_alone(
    prompt: list[int], said: list[int], presence: float, frequency: float
) -> None:
    """As OpenAI defines them: mu[j] - c[j] * frequency - (c[j] > 0) * presence."""
    logits = torch.linspace(-3, 3, VOCAB)
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    found = penalised(params, prompt, said, logits)
    for token in range(VOCAB):
        count = said.count(token)
        expected = float(logits[token]) - count * frequency - (count > 0) * presence
        assert float(found[token]) == pytest.approx(expected, abs=1e-5)


def test_an_answer_with_penalties_is_that_of_transformers(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", "qwen2")
    engine = Engine.load(EngineConfig(model=str(tmp_path / "m"), dtype="float32"))
    plain, other = (
        engine.run_alone(
            None,
            AskRequest("who?", [], BlendParams(), SamplingParams(max_tokens=24, repetition_penalty=p, ignore_eos=True)),
        )
        for p in (1.0, 1.6)
    )
    assert plain.generated_ids != other.generated_ids
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    prompt = torch.tensor([other.prompt_ids])
    with torch.no_grad():
        theirs = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=24,
            min_new_tokens=24,
            do_sample=False,
            repetition_penalty=1.6,
            eos_token_id=None,
        )
    assert theirs[0, prompt.shape[1] :].tolist() == other.generated_ids
    again = engine.run_alone(
        None,
        AskRequest("who?", [], BlendParams(), SamplingParams(max_tokens=24, frequency_penalty=100.0, ignore_eos=True)),
    )
    assert len(set(again.generated_ids)) == 24


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = tmp_path_factory.mktemp("models") / "m"
    write_checkpoint(path, "qwen2")
    return Engine.load(EngineConfig(model=str(path))).model


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.9}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        (
            {
                "do_sample": True,
                "temperature": 0.7,
                "top_p": 0.8,
                "top_k": 20,
                "repetition_penalty": 1.05,
                "min_p": None,
            },
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
        ),
    ],
)
def test_the_models_own_sampling_is_read(loaded: LoadedModel, config: dict[str, Any], says: dict[str, Any]) -> None:
    assert model_sampling(replace(loaded, generation_config=config)) == says


def test_settings_override_the_models_sampling(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
    model = replace(loaded, generation_config=config)

    def found(**flags: Any) -> SamplingParams:
        resolved = resolve(flags)
        return as_the_model(sampling_of(resolved.settings), model_sampled(resolved), model)

    default = SamplingParams(reasoning_tokens=Settings().reasoning_tokens)
    assert found() == default
    assert found(model_sampling=True) == replace(default, temperature=0.7, top_p=0.8, top_k=20)
    monkeypatch.setenv("CACHEBLEND_TOP_P", "0.5")
    assert found(model_sampling=True, temperature=0.0) == replace(default, temperature=0.0, top_p=0.5, top_k=20)


@pytest.mark.parametrize("config", [{"top_k": 1.5}, {"temperature": "warm"}, {"top_p": 7}, {"temperature": True}])
def test_invalid_model_sampling_is_named(loaded: LoadedModel, config: dict[str, Any]) -> None:
    resolved = resolve({"model_sampling": True})
    model = replace(loaded, generation_config={"do_sample": True, **config})
    with pytest.raises(UsageError, match=r"generation_config\.json"):
        as_the_model(sampling_of(resolved.settings), model_sampled(resolved), model)


def edited(name: str, **values: Any) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        data = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps({**data, **values}))

    return edit


def test_an_answer_ends_at_what_any_of_the_files_names(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "base", "qwen2")
    found = {}
    for name, edits in {
        "all": [("generation_config.json", [5, 6]), ("config.json", 7), ("tokenizer_config.json", "<|im_start|>")],
        "tokenizer": [("generation_config.json", None), ("config.json", None), ("tokenizer_config.json", "<|im_end|>")],
        "unknown": [("generation_config.json", 5), ("config.json", None), ("tokenizer_config.json", "<nothing>")],
    }.items():
        path = tmp_path / name
        shutil.copytree(tmp_path / "base", path)
        for file, value in edits:
            edited(file, **{"eos_token" if file.startswith("tok") else "eos_token_id": value})(path)
        found[name] = Engine.load(EngineConfig(model=str(path))).model.eos_ids
    assert found == {"all": {5, 6, 7, 1}, "tokenizer": {2}, "unknown": {5}}
