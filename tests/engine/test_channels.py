"""gpt-oss's channels: `final` is the answer, other channels are reasoning, and headers are dropped."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import write_checkpoint
from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.core.detokenizer import Detokenizer
from cacheblend_cli.engine.engine import Engine

MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|constrain|>")
REASONED = "<|channel|>analysis<|message|>We look it up.<|end|>"
CASES = [
    (f"{REASONED}<|start|>assistant<|channel|>final<|message|>In Bergen.", "We look it up.", "In Bergen."),
    ("<|channel|>final<|message|>In Bergen.", "", "In Bergen."),
    ("In Bergen.", "", "In Bergen."),
    (
        f"{REASONED}<|start|>assistant<|channel|>commentary to=f <|constrain|>json<|message|>{{}}<|end|>"
        "<|start|>assistant<|channel|>final<|message|>na\u00efve",
        "We look it up.\n{}",
        "na\u00efve",
    ),
    ("<|channel|>analysis<|message|>We look", "We look", ""),
    ("<|channel|>analy", "", ""),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = Path(tmp_path_factory.mktemp("models")) / "m"
    write_checkpoint(path, "qwen2", vocab_size=512)
    tokenizer = HFTokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    tokenizer.save(str(path / "tokenizer.json"))
    return Engine.load(EngineConfig(model=str(path)))


def said(speech: Detokenizer, ids: list[int]) -> tuple[str, str]:
    pieces = [*map(speech.push, ids), speech.flush()]
    return "".join(reasoning for reasoning, _ in pieces), "".join(answer for _, answer in pieces)


@pytest.mark.parametrize(("text", "reasoning", "answer"), CASES)
def test_the_final_channel_is_the_answer(text: str, reasoning: str, answer: str, engine: Engine) -> None:
    tokenizer = engine.model.tokenizer
    assert said(Detokenizer(tokenizer, (), False), tokenizer.encode_template(text)) == (reasoning, answer)


def test_a_stop_string_is_looked_for_in_the_answer_alone(engine: Engine) -> None:
    tokenizer, text = engine.model.tokenizer, CASES[0][0]
    assert said(Detokenizer(tokenizer, ("look", "en."), False), tokenizer.encode_template(text)) == (
        "We look it up.",
        "In Berg",
    )


def test_reasoning_that_has_used_its_tokens_up_is_ended_as_the_model_ends_it(engine: Engine) -> None:
    assert engine.runtime.template.may_reason
    tokenizer = engine.model.tokenizer
    speech = Detokenizer(tokenizer, (), False)
    for token_id in tokenizer.encode_template("<|channel|>analysis<|message|>We look"):
        speech.push(token_id)
    assert speech.reasoning.open
    for token_id in tokenizer.encode_template_rest(speech.closing):
        speech.push(token_id)
    assert not speech.reasoning.open
    assert said(speech, tokenizer.encode_template("In Bergen.")) == ("", "In Bergen.")
