"""Log-probabilities of a prompt's tokens equal transformers', for any slices of the prompt and any stored or cached
KV."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from engine_driver import CoreDriver, StoredEngine, open_stored_engine
from transformers import AutoModelForCausalLM

from cacheblend_cli.engine.events import Limits
from cacheblend_cli.errors import UsageError
from cacheblend_cli.types import Answer, BlendParams, SamplingParams


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredEngine]:
    with open_stored_engine(tmp_path_factory.mktemp("logprobs"), num_hidden_layers=2) as stored:
        yield stored


def check(stored: StoredEngine, answer: Answer, num_top: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(stored.engine.model.path).eval()
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([answer.prompt_ids])).logits[0], -1)
    told = answer.prompt_logprobs
    assert [p.id for p in told] == answer.prompt_ids[1:]
    own = expected[:-1].gather(1, torch.tensor(answer.prompt_ids[1:])[:, None])[:, 0]
    assert torch.allclose(torch.tensor([p.logprob for p in told]), own, atol=1e-4)
    top = torch.tensor([[value for _, value in p.top] for p in told])
    assert torch.allclose(top, expected[:-1].topk(num_top).values, atol=1e-4)


def test_prompt_logprobs_of_a_question_without_chunks(stored: StoredEngine) -> None:
    question = stored.question(prompt_logprobs=2)
    answer = stored.engine.run_alone(stored.store, question)
    check(stored, answer, 2)
    assert (answer.mode, answer.cached_tokens) == ("full", 0)
    assert len(answer.to_dict()["prompt_logprobs"]) == answer.prompt_tokens - 1
    assert (
        answer.generated_ids == stored.engine.run_alone(stored.store, stored.question(prompt_logprobs=0)).generated_ids
    )


def test_prompt_logprobs_in_slices_in_a_batch_and_with_a_full_prefix_cache(stored: StoredEngine) -> None:
    driver = CoreDriver(stored, Limits(max_rows=17, pool_tokens=4096))
    plain = [driver.arrive(stored.question(text))[0] for text in ("where does Mara work?", "who?")]
    driver.run()
    asked = [driver.arrive(stored.question(prompt_logprobs=3, n=n))[0] for n in (1, 2)]
    driver.run()
    for listener in asked:
        answers = listener.done().answers
        for answer in answers:
            check(stored, answer, 3)
            assert answer.prefix_cache_tokens == 0
    again = driver.arrive(replace(stored.question(), blend=BlendParams(mode="full")))[
        0
    ]  # others find it in the prefix cache
    driver.run()
    [answer] = again.done().answers
    assert answer.prefix_cache_tokens > 0
    assert answer.prompt_logprobs == plain[0].done().answers[0].prompt_logprobs == []


def test_the_number_of_prompt_logprobs_is_bounded(stored: StoredEngine) -> None:
    with pytest.raises(UsageError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=21)
    assert replace(SamplingParams(), prompt_logprobs=20).prompt_logprobs == 20
