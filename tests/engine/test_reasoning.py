"""Reasoning between think tags: apart from the answer, in whatever pieces it comes, within its own tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from callbacks import pieces_to
from checkpoints import write_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from plain_loop import generate
from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer
from torch import Tensor

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.core.detokenizer import ReasoningParser
from cacheblend_cli.engine.core.sequence_output import Generation
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.engine.runtime import Runtime
from cacheblend_cli.engine.worker.sampling import Sampler
from cacheblend_cli.model.tokenizer import Tokenizer
from cacheblend_cli.prompt.reasoning_tags import KNOWN, THINK, ReasoningTags
from cacheblend_cli.types import AskRequest, BlendParams, SamplingParams

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}"
)
CASES = [
    ("plain", False, "", "plain"),
    ("  two\n", False, "", "  two\n"),
    ("<think>why</think>\n\nso", False, "why", "so"),
    ("\n<think>\nwhy</think>so", False, "\nwhy", "so"),
    ("why</think>\nso</think>", True, "why", "so</think>"),
    ("why < and </thin", True, "why < and </thin", ""),
    ("<think>why", False, "why", ""),
    ("<thin", False, "", "<thin"),
    ("a <think>b</think>", False, "", "a <think>b</think>"),
    ("</think>so", True, "", "so"),
    ("", True, "", ""),
]


def of_tags(text: str, tags: ReasoningTags) -> str:
    """Return the text of a case with other tags, also where it breaks off within one."""
    text = text.replace(THINK.open, tags.open).replace(THINK.close, tags.close)
    for part, tag in (("</thin", tags.close), ("<thin", tags.open)):
        text = text.removesuffix(part) + tag[:-1] if text.endswith(part) else text
    return text


@given(st.sampled_from(CASES), st.sampled_from(KNOWN), st.lists(st.integers(1, 7), max_size=20))
def test_the_parts_are_told_apart_in_any_pieces(
    case: tuple[str, bool, str, str], tags: ReasoningTags, sizes: list[int]
) -> None:
    opened = case[1]
    text, reasoning, answer = (of_tags(part, tags) for part in (case[0], case[2], case[3]))
    parts, found, at = ReasoningParser(opened, tags), ["", ""], 0
    for size in [*sizes, len(text)]:
        for i, piece in enumerate(parts.push(text[at : at + size])):
            found[i] += piece
        at += size
    for i, piece in enumerate(parts.flush()):
        found[i] += piece
    assert found == [reasoning, answer]


@pytest.fixture(scope="module", params=["text", "token", "special token"])
def engine(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Engine:
    """The tags are text of several tokens, a token, or a token that decoding passes over."""
    path = tmp_path_factory.mktemp("models") / "m"
    write_checkpoint(path, "qwen2", vocab_size=512)
    (path / "cacheblend_prompt.txt").unlink()  # over the default prompt this model says something that can be read
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    if request.param != "text":
        tokenizer = HFTokenizer.from_file(str(path / "tokenizer.json"))
        special = request.param == "special token"
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([AddedToken(tag, special=special, normalized=False) for tag in ("<think>", "</think>")])
        tokenizer.save(str(path / "tokenizer.json"))
    return Engine.load(EngineConfig(model=str(path)))


def thinking(engine: Engine) -> Runtime:
    """With a template that opens the tag itself."""
    return Runtime(engine.model, replace(engine.config, template_var=("enable_thinking=true",)))


class Says(Sampler):
    """Draws what a script says, then the letter x."""

    script: tuple[int, ...] = ()

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._left = list(self.script)

    def said(self) -> int:
        return self._left.pop(0) if self._left else self._x

    _x = 0


def said_by(samplers: Sequence[Says], logits: Tensor) -> Tensor:
    """What is drawn where nothing is forced, int64 [n]."""
    return torch.tensor([sampler.said() for sampler in samplers])


Saying = Callable[..., Generation]


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Saying:
    def run(runtime: Runtime, text: str, params: SamplingParams, ahead: bool) -> Generation:
        of: Tokenizer = runtime.model.tokenizer
        Says.script, Says._x = tuple(of.encode_template_rest(text)), of.encode_text("x")[0]
        monkeypatch.setattr("cacheblend_cli.engine.core.sequence_output.Sampler", Says)
        monkeypatch.setattr("cacheblend_cli.engine.worker.sampling._tokens", said_by)
        sequence = runtime.new_sequence(1 + runtime.max_new_tokens(params))
        sequence.ensure(1 + runtime.max_new_tokens(params))
        logits = torch.zeros(runtime.model.spec.vocab_size)
        pieces = ["", ""]

        def keep(i: int) -> Callable[[str], None]:
            def add(piece: str) -> None:
                pieces[i] += piece

            return add

        try:
            out = generate(runtime, sequence, 1, logits, params, pieces_to(keep(0), keep(1)))
        finally:
            sequence.release()
        assert (pieces[0], pieces[1].strip()) == (out.text, out.reasoning)
        return out

    return run


@pytest.mark.parametrize("ahead", [False, True])
def test_an_answer_and_its_reasoning(engine: Engine, say: Saying, ahead: bool) -> None:
    params = SamplingParams(max_tokens=8, reasoning_tokens=40, stop=("so",))
    out = say(engine.runtime, "<think>so why</think>\n\nyesso", params, ahead)
    assert (out.reasoning, out.text, out.finish_reason) == ("so why", "yes", "stop"), "a stop string is the answer's"
    out = say(thinking(engine), "so why</think>\n\nyes", params, ahead)
    assert (out.reasoning, out.text[:4], out.finish_reason) == ("so why", "yesx", "length")
    assert not out.reasoning_cut
    assert len(out.token_ids) - out.reasoning_tokens == 8


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 4])
def test_reasoning_ends_when_its_tokens_are_used_up(engine: Engine, say: Saying, budget: int, ahead: bool) -> None:
    params = SamplingParams(max_tokens=6, reasoning_tokens=budget)
    for runtime, said in ((thinking(engine), ""), (engine.runtime, "<think>")):
        out = say(runtime, said, params, ahead)
        assert out.reasoning == "x" * budget
        assert set(out.text) == {"x"}
        assert out.reasoning_cut
        assert out.finish_reason == "length"


def test_a_model_without_tags_has_no_tokens_for_them(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", "qwen2")
    runtime = Engine.load(EngineConfig(model=str(tmp_path / "m"))).runtime
    assert runtime.max_new_tokens(SamplingParams(max_tokens=7, reasoning_tokens=1000)) == 7


def test_a_template_that_closes_the_tags_leaves_no_room_for_them(engine: Engine) -> None:
    params = SamplingParams(max_tokens=7, reasoning_tokens=1000)
    assert engine.runtime.max_new_tokens(params) > 1007
    closed = replace(engine.runtime.template, after_question="<|im_end|>\n<think>\n\n</think>\n\n")
    assert not closed.may_reason
    assert not closed.opens_reasoning


def test_ask_tells_of_the_reasoning(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asking = Engine(thinking(engine))
    said = SamplingParams(max_tokens=4, reasoning_tokens=3, ignore_eos=True)
    answer = asking.run_alone(None, AskRequest("who?", [], BlendParams(), said))
    record = answer.to_dict()
    assert record["reasoning_tokens"] >= 3
    assert record["generated_tokens"] > 4
    assert "reasoning was ended after 3 tokens" in record["notes"][0]
