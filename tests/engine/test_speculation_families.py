"""Speculative decoding: answers with proposals are those of a token a step, for every family of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hub_families
import hub_generic
import hub_models
import pytest
from checkpoints import FAMILY_CONFIGS, OTHER_CONFIGS, write_checkpoint
from engine_driver import CoreDriver, StoredEngine, open_stored_engine
from gguf_files import write_gguf
from oracle_lookup import Oracle
from proposal_checks import GREEDY, LIMITS, SAMPLED, alone, arrive, check, facts, of_length, with_proposals

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.worker.worker import DecodeInput, Worker
from cacheblend_cli.model.linear import STEADY_ROWS


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    return Oracle(monkeypatch)


@pytest.mark.parametrize("family", [*FAMILY_CONFIGS, *OTHER_CONFIGS])
def test_answers_of_a_family(family: str, tmp_path: Path, oracle: Oracle) -> None:
    """Greedy and sampled, of one prompt and beside others of other lengths."""
    own = OTHER_CONFIGS.get(family, (None, {}))[1]
    width = (
        {"hidden_size_per_layer_input": 16} if family.startswith("gemma") else {}
    )  # whole vectors: torch's gelu differs in the rest of one
    with open_stored_engine(
        tmp_path, family, pages=2, num_hidden_layers=own.get("num_hidden_layers", 3), **width
    ) as stored:
        questions = [stored.question(**GREEDY), stored.question("who keeps a parrot near the harbor?", **SAMPLED)]
        if not stored.engine.runtime.decoder.steady:
            assert CoreDriver(with_proposals(stored), LIMITS).core.scheduler.speculation is None
            return
        driver, listeners = check(stored, oracle, questions)
        answers = [listener.done().answers[0] for listener in listeners]
        for answer in answers:
            assert 0 < answer.accepted_tokens < len(answer.generated_ids) - 1
            assert answer.tokens_per_step > 1
        assert driver.core.counts.accepted == sum(answer.accepted_tokens for answer in answers)


HUB = (
    "gemma-2", "gpt-oss-20b", "command-r, biases", "stablelm, parallel", "glm-4.7-flash", "minicpm3", "phi-3-mini-128k",
    "ministral-3-8b", "mixtral-8x7b", "smollm3", "olmo-2, grouped", "granite-3", "exaone-4-32b", "dynamic", "longrope",
)  # fmt: skip
"""With soft caps, sinks, parallel residuals, streams, latents, two sets of frequencies, experts and windows."""
GENERIC = ("phi", "gpt-neox", "granite with windows and sinks")
MODELS = {m.name: m for m in [*hub_models.RUN, *hub_families.RUN, *hub_generic.RUN]}


def without_store(path: Path, name: str, **config: Any) -> StoredEngine:
    given = {
        "model": str(path / "model"),
        "block_size": 16,
        "dtype": "float32",
        "prompt": "{chunks} {question}",
        "speculate": "off",
    }
    MODELS[name].write(path / "model")
    return StoredEngine(Engine.load(EngineConfig(**given | config)), None, [])  # type: ignore[arg-type]


def check_model(stored: StoredEngine, oracle: Oracle) -> CoreDriver:
    """Where frequencies depend on the length, they change within the answers."""
    switches = stored.engine.runtime.decoder.rope.switches_at
    lengths = (30, 34) if switches is None else range(switches - 18, switches - 6, 2)
    settings = (GREEDY | {"max_tokens": 24}, SAMPLED | {"max_tokens": 24})
    questions = [of_length(stored, length, **settings[i % 2]) for i, length in enumerate(lengths)]
    return check(stored, oracle, questions)[0]


@pytest.mark.parametrize("name", [*HUB, *GENERIC])
def test_answers_of_a_model(name: str, tmp_path: Path, oracle: Oracle) -> None:
    stored = without_store(tmp_path, name)
    check_model(stored, oracle)
    assert name != "dynamic" or stored.engine.runtime.decoder.rope.switches_at is not None


NARROW = (
    "gemma-4-e2b", "gemma-4-e4b, a cap", "gemma-4-e2b, inside another", "gemma-3n-e4b", "gemma-3n-e2b, widths",
    "gemma-3n, no shared layers, no scale", "mixtral, window, all experts",
)  # fmt: skip
"""With a width below that of a vector, by which torch rounds the last row of several in another way."""


@pytest.mark.torture
@pytest.mark.parametrize("name", [name for name in MODELS if name not in (*HUB, *GENERIC, *NARROW)])
def test_answers_of_any_model(name: str, tmp_path: Path, oracle: Oracle) -> None:
    stored = without_store(tmp_path, name)
    if stored.engine.runtime.decoder.steady:
        check_model(stored, oracle)


def test_where_rows_depend_on_their_number_nothing_is_proposed(tmp_path: Path, oracle: Oracle) -> None:
    stored = without_store(tmp_path, "olmoe")
    assert not stored.engine.runtime.decoder.steady
    assert CoreDriver(with_proposals(stored), LIMITS).core.scheduler.speculation is None


@pytest.mark.parametrize("name", ["llama-3.2", "gemma-2", "mixtral-8x7b", "minicpm3"])
def test_answers_in_bfloat16(name: str, tmp_path: Path, oracle: Oracle) -> None:
    check_model(without_store(tmp_path, name, dtype="bfloat16"), oracle)


@pytest.mark.parametrize(
    "config", [{"weight_dtype": "int8"}, {"kv_pool_dtype": "float8_e4m3"}, {"gguf": "Q8_0"}, {"gguf": "Q4_K"}], ids=str
)
def test_answers_of_rounded_weights_or_kv(config: dict[str, str], tmp_path: Path, oracle: Oracle) -> None:
    config = dict(config)
    if (kind := config.pop("gguf", None)) is not None:
        write_checkpoint(tmp_path / "own", "llama-gqa", hidden_size=256, intermediate_size=256, num_hidden_layers=2)
        write_gguf(tmp_path / "own", tmp_path / "m.gguf", "llama", kind)
        config["model"] = str(tmp_path / "m.gguf")
    check_model(without_store(tmp_path, "llama-3.2", **config), oracle)


def test_where_torch_multiplies_a_batch_has_four_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are rounded in another way: six answers together, and prompts that could share a launch."""
    sizes, decode = list[int](), Worker.decode

    def counted(worker: Worker, given: DecodeInput, *tokens: Any) -> Any:
        sizes.append(len(given.kv_lens))
        return decode(worker, given, *tokens)

    with open_stored_engine(tmp_path, "qwen3-moe", pages=2) as stored:
        assert stored.engine.runtime.decoder.multiplies_by_torch
        questions = [of_length(stored, length, **GREEDY) for length in range(20, 26)]
        expected = alone(stored, questions)
        monkeypatch.setattr(Worker, "decode", counted)
        driver = CoreDriver(stored, LIMITS)
        listeners = arrive(driver, questions)
        driver.run()
        assert [facts(listener) for listener in listeners] == [facts(listener) for listener in expected]
    assert max(sizes) == STEADY_ROWS
    assert driver.core.counts.joined == 0
