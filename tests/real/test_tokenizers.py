"""Published tokenizers with their templates: prompts are what transformers renders and encodes, and text forges no
control token."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from real_packages import TOKENIZERS, tokenizer_folder
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from cacheblend_cli.engine.config import EngineConfig
from cacheblend_cli.engine.engine import Engine
from cacheblend_cli.model.text_stream import TextStream
from cacheblend_cli.model.tokenizer import Tokenizer
from cacheblend_cli.prompt.template import PromptTemplate, split_template
from cacheblend_cli.prompt.wording import Wording
from cacheblend_cli.types import AskRequest, SamplingParams

pytestmark = pytest.mark.real
TEXTS = {
    "lines": "one\ntwo\n\nthree\n\n\n\nfour\r\nfive",
    "indentation": "def f(x):\n    if x:\n        return 1\n\treturn\t2\n                deep",
    "spaces": "a  b   c    d     e          f",
    "trailing": "ends with spaces   \n\n",
    "table": "| Item | Price |\n|------|------:|\n| Valve | 14 |\n| Gasket | 3.50 |",
    "html": "<table><tr><th>Item</th><td>x</td></tr></table><br/><b>bold</b> <i>it</i> <code>c</code>",
    "html-page": '<!DOCTYPE html>\n<html><body class="x"><h1>T</h1><ul><li>a</li></ul></body></html>',
    "xml": '<?xml version="1.0"?><a:b xmlns:a="u"><![CDATA[x]]></a:b>',
    "json": '{"a": [1, 2.5, null], "b": {"c": "\\n"}}',
    "code": 'for (int i = 0; i < n; ++i) { a[i] += "x\\t"; } // done',
    "math": "$\\sum_{i=0}^{n} x_i^2 \\leq \\frac{1}{2}$ ≈ ∞ ∀x∈ℝ",
    "numbers": "1234567890 3.14159 1,000,000 0x1F -7 1e-5 2026-11-24",
    "chinese": "視野無限廣，窗外有藍天。谁负责账单？",
    "japanese": "いろはにほへと チリヌルヲ 漢字",
    "korean": "키스의 고유조건은 입술끼리 만나야 하고",
    "vietnamese": "Cửa Việt ngữ, đường phố",
    "cyrillic": "Съешь же ещё этих мягких булок",
    "arabic": "نص حكيم له سر قاطع",
    "hebrew": "דג סקרן שט בים מאוכזב",
    "devanagari": "ऋषियों को सताने वाले",
    "thai": "เป็นมนุษย์สุดประเสริฐ",
    "emoji": "👩‍👩‍👧 🦜 🇩🇪 👍🏽",
    "combining": "e\u0301 n\u0303 \u0061\u0308 \u200b\u200d\ufeff",
    "contractions": "It's we're I'LL they'd DON'T",
    "quotes": "“curly” ‘single’ «guillemets» – — …",
    "urls": "https://example.org/a?b=c&d=%20#e mail@example.org",
    "rare": "\U00020bb7 \U0001f9ff \u1e9e \u0130\u0131 \u01c5",
    "repeated": "aaaaaaaaaaaaaaaaaaaa ==================== --------",
    "mark": "a\u2581b \u2581\u2581",
    "one": "x",
}
BEFORE, BETWEEN = "Documents:\n", "\nQuestion: "
CONTROL = (
    "<|im_end|>", "<|im_start|>system", "<|eot_id|>", "<|start_header_id|>", "<start_of_turn>", "<end_of_turn>", "<bos>", "<eos>",
    "<s>", "</s>", "[INST]", "[/INST]", "<tool_call>", "<think>", "</think>", "<|channel|>", "<|end|>", "<｜User｜>",
    "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<unused7>", "<mask>", "<start_of_image>", "<|reserved_special_token_0|>",
)  # fmt: skip
NORMALISES = {"qwen3": ("combining",)}
"""Texts that a tokenizer does not give back: Qwen's puts them into NFC."""


@cache
def theirs(name: str) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(str(tokenizer_folder(name)))


@cache
def ours(name: str) -> Tokenizer:
    return Tokenizer(tokenizer_folder(name))


@cache
def template_of(name: str) -> PromptTemplate:
    return split_template(ours(name), Wording(prompt=f"{BEFORE}{{chunks}}{BETWEEN}{{question}}"))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_prompt_has_the_ids_of_transformers(name: str) -> None:
    """The chunk begins behind a line break and ends with a word, so that encoding in parts changes nothing."""
    template, tokenizer = template_of(name), ours(name)
    differing = []
    for label, text in TEXTS.items():
        chunk, question = f"{text} end", f"{text} end"
        content = f"{BEFORE}{chunk}{BETWEEN}{question}"
        if tokenizer.has_template:
            messages = [{"role": "user", "content": content}]
            expected = theirs(name).apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False, enable_thinking=False, thinking=False
            )
        else:
            begin = tokenizer.special("bos_token") or ""
            expected = theirs(name)(f"{begin}{content}\n\nAnswer:", add_special_tokens=False).input_ids
        if [*template.prefix_ids, *tokenizer.encode_text(chunk), *template.suffix_ids(question)] != expected:
            differing.append(label)
    assert not differing


@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_text_forges_a_control_token(name: str) -> None:
    tokenizer, template = ours(name), template_of(name)
    contents = {str(theirs(name).convert_ids_to_tokens(i)) for i in tokenizer.control_ids}
    honest = sum(i in tokenizer.control_ids for i in template.suffix_ids("Who is it?"))
    for control in {*contents, *CONTROL}:
        for text in (control, f"before {control} after", f"{control}{control}", f"a{control}b"):
            ids = tokenizer.encode_text(text)
            assert tokenizer.control_ids.isdisjoint(ids), text
    for control in CONTROL:
        decoded = tokenizer.decode(tokenizer.encode_text(f"see {control} there"))
        assert decoded.replace("\u2581", " ").split() == f"see {control} there".replace("\u2581", " ").split()
        suffix = template.suffix_ids(f"What is {control} for?")
        assert sum(i in tokenizer.control_ids for i in suffix) == honest, control


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_prompt_begins_once(name: str) -> None:
    tokenizer = ours(name)
    bos = tokenizer.special("bos_token")
    ids = [*template_of(name).prefix_ids, *tokenizer.encode_text("the page"), *template_of(name).suffix_ids("Who?")]
    if bos is not None and tokenizer.token_id(bos) in tokenizer._tokenizer.encode("x").ids:
        assert ids.count(tokenizer.token_id(bos)) == 1
    elif bos is not None:
        assert ids.count(tokenizer.token_id(bos)) <= 1


@pytest.mark.parametrize("name", TOKENIZERS)
def test_streamed_text_is_the_decode_and_text_comes_back(name: str) -> None:
    tokenizer = ours(name)
    for label, text in TEXTS.items():
        ids = tokenizer.encode_text(f"x{text}")
        stream = TextStream(tokenizer)
        streamed = "".join(stream.push(i) for i in ids) + stream.flush()
        assert streamed == tokenizer.decode(ids), label
        if label not in NORMALISES.get(name, ()) and label != "mark":
            assert streamed == f"x{text}", label


END = {
    "gemma3": "<end_of_turn>", "llama2": "</s>", "llama3": "<|eot_id|>", "llama3_1": "<|eot_id|>", "qwen3": "<|im_end|>",
    "deepseek_v3": "<｜end▁of▁sentence｜>", "gptoss": "<|return|>",
}  # fmt: skip
"""What the publisher's generation_config.json ends an answer at; Gemini's tokenizer comes without a chat template of
turns."""


@pytest.mark.parametrize("name", END)
def test_an_answer_ends_where_the_template_ends_a_turn(name: str, tmp_path: Path) -> None:
    """A model of random weights over the tokenizer, without a generation_config.json, is made to say the token."""
    for file in tokenizer_folder(name).iterdir():
        shutil.copy(file, tmp_path)
    shape = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(vocab_size=ours(name).vocab_size, **shape)).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    engine = Engine.load(EngineConfig(model=str(tmp_path), dtype="float32"))
    for token, reason in ((END[name], "stop"), ("x", "length")):
        token_id = ours(name).token_id(token)
        assert token_id is not None
        bias = SamplingParams(max_tokens=3, logit_bias=((token_id, 1e4),), stop_repetition=False)
        answer = engine.run_alone(None, AskRequest("Who leads billing?", sampling=bias))
        assert answer.finish_reason == reason, token
