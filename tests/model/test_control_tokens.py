"""Added tokens that are text, and those that are control tokens: text is encoded as the model's own tokenizer does, and
forges none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from text_tokenizers import KINDS, MARK
from tokenizers import AddedToken

from cacheblend_cli.model.tokenizer import Tokenizer
from cacheblend_cli.model.tokenizer_json import is_control

TEXTS = [
    "First line.\nSecond line.\n\n\nA new section.\n",
    "def f(x):\n    if x:\n\t\treturn [\n            x,\n        ]\n",
    "| name  | price |\n|-------|------:|\n| Koven |  12.50 |\na\tb\t\tc\n",
    '<p class="x">1 < 2 &amp; <b>bold</b></p>\n<table><tr><td>[1]</td></tr></table>\n**bold** `code`\n',
    "<s>[INST] <<SYS>> <|im_start|>user <|eot_id|> <start_of_turn> <think></think> [PAD]\n",
    "Caf\u00e9, stra\u00dfe, \u043f\u0440\u0438\u0432\u0435\u0442, \u65e5\u672c\u8a9e, \U0001f600\n",
    "\n\n\na\n",
    "  two   three\n    four",
    "<b>bold</b> <hr>",
    "a\tb\t\tc",
    "1 < 2 > 0",
]
LIKE_GEMMA = ["\n", "\n\n", "\n\n\n", MARK * 2, MARK * 3, MARK * 4, "\t", "\t\t", "<b>", "</b>", "<table>", "<h1>"]
LIKE_DEEPSEEK = ["<\uff5cUser\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<think>", "<tool_call>"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}^user^ {{ m.content }}\n\n{% endfor %}"


def tokenizer_with(
    folder: Path, kind: str, plain: Sequence[str] = (), special: Sequence[str] = (), template: str | None = None
) -> Tokenizer:
    """Return a tokenizer of that kind with more added tokens, some special."""
    folder.mkdir(parents=True, exist_ok=True)
    made = KINDS[kind]()
    made.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    made.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"} | ({} if template is None else {"chat_template": template})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(folder)


def own_ids(folder: Path, text: str) -> list[int]:
    """Return what the model's own tokenizer gives in the middle of a prompt, behind a line break."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize(
    ("content", "special", "control"),
    [
        ("<pad>", True, True),
        ("<|im_end|>", False, True),
        ("<\uff5cUser\uff5c>", False, True),
        ("<|turn>", False, True),
        ("<turn|>", False, True),
        ("[INST]", False, True),
        ("[/INST]", False, True),
        ("<tool_call>", False, True),
        ("</think>", False, True),
        ("<start_of_turn>", False, True),
        ("<unused99>", False, True),
        ("^user^", False, True),
        ("\n", False, False),
        ("\n\n", False, False),
        (MARK * 8, False, False),
        ("<b>", False, False),
        ("</TABLE>", False, False),
        ("<br/>", False, False),
        ("<0x0A>", False, False),
        ("[ ]", False, False),
        ("kw", False, False),
    ],
)
def test_which_added_tokens_are_control_tokens(content: str, special: bool, control: bool) -> None:
    assert is_control(content, special=special, template="^user^ text\n\n") is control


@pytest.mark.parametrize("kind", ["gemma", "byte-level"])
def test_added_tokens_of_text_are_matched_as_by_the_model_itself(kind: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, kind, LIKE_GEMMA, template=TEMPLATE)
    matched = set[int]()
    for text in TEXTS:
        ids = tokenizer.encode_text(text)
        if "<s>" not in text:
            assert ids == own_ids(tmp_path, text)
        assert tokenizer.decode(ids) == text
        matched |= {*ids}
    assert {tokenizer.token_id(t) for t in ("\n\n\n", "<b>", "</b>", "\t\t")} <= matched


@pytest.mark.parametrize("kind", ["gemma", "byte-level", "llama2-legacy"])
@pytest.mark.parametrize("special", [False, True])
def test_no_text_forges_a_control_token(kind: str, special: bool, tmp_path: Path) -> None:
    controls = [*LIKE_DEEPSEEK, "[TOOL]", "^user^"]
    added = {"special": controls} if special else {"plain": controls}
    tokenizer = tokenizer_with(tmp_path, kind, **added, template=TEMPLATE)
    for control in [*controls, "<s>", "</s>", "[INST]"]:
        token_id = tokenizer.token_id(control)
        assert token_id in tokenizer.control_ids
        for text in (control, f"see {control} there", control * 2, f"a{control}b"):
            ids = tokenizer.encode_text(text)
            assert tokenizer.control_ids.isdisjoint(ids)
            decoded = tokenizer.decode(ids, skip_special_tokens=False)
            assert decoded.replace(MARK, " ") == text.replace(MARK, " ")
        assert token_id in tokenizer.encode_template(f"see {control} there")


def test_a_control_token_that_the_vocabulary_merges_is_cut_apart(tmp_path: Path) -> None:
    """Merges make it out of its characters: Gemma has every one of its control tokens in its vocabulary."""
    made = KINDS["gemma"]()
    data = json.loads(made.to_str())
    vocab = data["model"]["vocab"]
    data["added_tokens"] = data["added_tokens"][:-1]
    first = max(vocab.values()) + 1
    vocab |= {name: first + i for i, name in enumerate(("X", "aX", "aXb"))}
    data["model"]["merges"] = [["a", "X"], ["aX", "b"], *data["model"]["merges"]]
    made = tokenizers.Tokenizer.from_str(json.dumps(data))
    made.add_special_tokens(["aX", "aXb"])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    tokenizer = Tokenizer(tmp_path, 1000)
    ids = made.get_vocab()
    assert own_ids(tmp_path, "aXb") == [ids["aXb"]]
    assert tokenizer._stages.plain.encode("aXb").ids == [ids["aXb"]], "the merges alone yield it"
    for text in ("aXb", "aaXbb", "aXaXb", "is aX the aXb"):
        found = tokenizer.encode_text(text)
        assert tokenizer.control_ids.isdisjoint(found)
        assert tokenizer.decode(found) == text
