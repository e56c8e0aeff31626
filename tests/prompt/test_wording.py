"""System prompt, wording and template variables: rendered as the chat template does, refused by name where it
cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import tokenizer_with_template

from cacheblend_cli.demo import model_dir
from cacheblend_cli.errors import NotFoundError, TemplateFailed, UsageError
from cacheblend_cli.model.tokenizer import Tokenizer
from cacheblend_cli.prompt.reasoning_tags import KNOWN, ReasoningTags
from cacheblend_cli.prompt.template import split_template
from cacheblend_cli.prompt.wording import DEFAULT, OWN_FILE, Wording, check_prompt, parse_variables, read_prompt

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}"
    "[no thoughts]{% endif %}{% endif %}"
)
PROMPT = "Read {chunks} and say {question} in French, as {JSON: 1}."


def tokenizer(path: Path, template: str = CHATML) -> Tokenizer:
    return tokenizer_with_template(path, template)


def text_of(of: Tokenizer, wording: Wording, chunks: str, question: str) -> str:
    """What the model reads of a prompt with these chunks."""
    parts = split_template(of, wording)
    ids = [*parts.prefix_ids, *of.encode_text(chunks), *parts.suffix_ids(question)]
    return of.decode(ids, skip_special_tokens=False)


def test_the_handbooks_model_is_asked_as_it_was_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    from tools.demo_model.samples import PREFIX

    of = Tokenizer(model_dir())
    wording = Wording.of(model_dir())
    assert not wording.given
    assert (model_dir() / OWN_FILE).is_file()
    parts = split_template(of, wording)
    assert list(parts.prefix_ids) == of.encode_template(PREFIX)
    assert text_of(of, wording, "Mara", "Who?").endswith("Mara\n\nQuestion: Who?<|end|>\n<|assistant|>\n")


def test_the_prompt_is_what_transformers_renders(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    wording = Wording(PROMPT, "You are terse.\nBe kind.", {"enable_thinking": True})
    ours = text_of(tokenizer(tmp_path / "m"), wording, "one\n\n two", "who?")
    messages = [
        {"role": "system", "content": "You are terse.\nBe kind."},
        {"role": "user", "content": "Read one\n\n two and say who? in French, as {JSON: 1}."},
    ]
    reference = AutoTokenizer.from_pretrained(tmp_path / "m")
    render = {"tokenize": False, "add_generation_prompt": True}
    assert ours == reference.apply_chat_template(messages, enable_thinking=True, **render)
    plain = text_of(tokenizer(tmp_path / "m"), Wording(PROMPT), "one\n\n two", "who?")
    assert plain == reference.apply_chat_template(messages[1:], enable_thinking=False, **render)
    assert plain.endswith("[no thoughts]")


@pytest.mark.parametrize("system", ["user", "a", "<", "Chunks5d1fe0b7n0Stand3c9aHere", "5d1fe0b7n0Stand3c9aHere"])
def test_a_system_prompt_may_be_any_words(tmp_path: Path, system: str) -> None:
    """Also words that the template writes itself, and the sentinels that it is split at."""
    from transformers import AutoTokenizer

    of = tokenizer(tmp_path / "m")
    ours = split_template(of, Wording(PROMPT, system))
    text = ours.before_chunks + "one" + ours.before_question + "who?" + ours.after_question
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": Wording(PROMPT).message("one", "who?")},
    ]
    reference = AutoTokenizer.from_pretrained(tmp_path / "m")
    render = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
    assert text == reference.apply_chat_template(messages, **render)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('System role not supported') if messages[0]['role'] == 'system' }}{{ messages[-1]['content'] }}",
         "System role not supported"),
        ("{{ messages[-1]['content'] }}", "does not render the system prompt exactly once"),
    ],
)  # fmt: skip
def test_a_template_without_a_system_prompt_says_so(tmp_path: Path, template: str, says: str) -> None:
    of = tokenizer(tmp_path / "m", template)
    split_template(of, Wording())
    with pytest.raises(UsageError, match=says) as caught:
        split_template(of, Wording(system="Be terse."))
    assert "--prompt" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "content", ["m['content'] | tojson", "m['content'] | e", "m['content'] | lower", "m['content'] * 2", "''"]
)
def test_a_template_that_rewrites_messages_is_refused(tmp_path: Path, content: str) -> None:
    """Chunks are tokenised once, as they are: what such a template makes of their text would be another prompt."""
    of = tokenizer(
        tmp_path / "m", "{% for m in messages %}{{ m['role'] }}: {{ CONTENT }}{% endfor %}".replace("CONTENT", content)
    )
    with pytest.raises(UsageError) as caught:
        split_template(of)
    assert caught.value.exit_code == 2
    assert caught.value.hint


def test_a_template_that_escapes_earlier_turns_is_refused_with_history(tmp_path: Path) -> None:
    escaped = "{{ m['content'] | tojson if m['role'] == 'assistant' else m['content'] }}"
    template = split_template(tokenizer(tmp_path / "m", f"{{% for m in messages %}}{escaped}{{% endfor %}}"))
    template.suffix_ids("who?")
    with pytest.raises(UsageError):
        template.suffix_ids("who?", ["where?", "there"])


def test_a_control_token_in_the_users_wording_is_refused(tmp_path: Path) -> None:
    of = tokenizer(tmp_path / "m")
    with pytest.raises(UsageError, match=r"--system.*<\|im_end\|>"):
        split_template(of, Wording(system="Be terse.<|im_end|>"))
    with pytest.raises(UsageError, match=r"--prompt.*<s>"):
        split_template(of, Wording("<s>" + PROMPT))
    split_template(of, Wording("<tool_call>" + PROMPT))  # not special: the user's to write


def test_an_unknown_variable_is_named_with_those_there_are(tmp_path: Path) -> None:
    of = tokenizer(tmp_path / "m")
    for name in ("thinking", "messages", "bos_token"):
        with pytest.raises(UsageError, match=name) as caught:
            split_template(of, Wording(variables={name: True}))
        assert caught.value.hint == "it has: enable_thinking"


def test_a_damaged_template_is_told_whatever_is_asked_of_it(tmp_path: Path) -> None:
    of = tokenizer(tmp_path / "m", "{% if %}")
    for wording in (Wording(), Wording(variables={"enable_thinking": True})):
        with pytest.raises(TemplateFailed):
            split_template(of, wording)


@pytest.mark.parametrize(
    ("template", "says", "hint"),
    [
        ("{% for t in tools %}{{ t }}{% endfor %}{{ tools | length }}{{ messages[-1]['content'] }}",
         "TypeError", "chat_template"),
        ("{{ 1 / 0 }}{{ messages[-1]['content'] }}", "ZeroDivisionError", "chat_template"),
        ("{{ datetime + '' }}{{ messages[-1]['content'] }}", "datetime", "--template-var"),
    ],
)  # fmt: skip
def test_whatever_a_template_raises_is_a_usage_error(tmp_path: Path, template: str, says: str, hint: str) -> None:
    """With a system prompt, too: it is not blamed for what fails without it."""
    of = tokenizer(tmp_path / "m", template)
    for wording in (Wording(), Wording(system="Be terse.")):
        with pytest.raises(TemplateFailed) as caught:
            split_template(of, wording)
        assert says in caught.value.message
        assert hint in (caught.value.hint or "")


def test_templates_that_name_the_switch_of_thinking_otherwise_do_not_think_either(tmp_path: Path) -> None:
    of = tokenizer(
        tmp_path / "m", "{{ messages[-1]['content'] }}{% if thinking is not false %}<think>{% endif %}answer:"
    )
    assert split_template(of, Wording()).after_question.endswith("answer:")
    assert "<think>" in split_template(of, Wording(variables={"thinking": True})).after_question


@pytest.mark.parametrize("tags", KNOWN, ids=lambda tags: tags.open)
@pytest.mark.parametrize("opened", [True, False])
def test_the_tags_of_reasoning_are_the_templates(tmp_path: Path, tags: ReasoningTags, opened: bool) -> None:
    earlier = f"{{% for m in messages[:-1] %}}{tags.open}{{{{ m.reasoning }}}}{tags.close}{{% endfor %}}"
    of = tokenizer(tmp_path / "m", earlier + "{{ messages[-1]['content'] }}\n" + (tags.open if opened else ""))
    template = split_template(of, Wording())
    assert template.reasoning_tags == tags
    assert template.opens_reasoning is opened
    assert template.may_reason


@pytest.mark.parametrize(
    ("items", "found"),
    [
        (["enable_thinking=true", "n = 3"], {"enable_thinking": True, "n": 3}),
        (["effort=low", 'quoted="3"', "empty="], {"effort": "low", "quoted": "3", "empty": ""}),
        (["list=[1, 2]", "eq=a=b"], {"list": [1, 2], "eq": "a=b"}),
    ],
)
def test_variables_are_json_or_text(items: list[str], found: dict[str, Any]) -> None:
    assert parse_variables(items) == found


@pytest.mark.parametrize("item", ["enable_thinking", "=true", "a b=1", "1a=2"])
def test_what_is_no_variable_is_refused(item: str) -> None:
    with pytest.raises(UsageError, match="NAME=VALUE"):
        parse_variables([item])


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("{question}", "{chunks}"),
        ("{chunks}", "{question}"),
        ("{chunks} {chunks} {question}", "2 times"),
        ("{question} {chunks}", "{question}"),
        ("{chunks} {author} {question}", "{author}"),
        ("{chunks} {questions}", "{questions}"),
    ],
)
def test_a_prompt_that_cannot_be_is_refused(prompt: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_prompt(prompt)
    assert says in caught.value.message


def test_a_prompt_file_is_named_in_what_is_wrong_with_it(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    with pytest.raises(NotFoundError, match=r"p\.txt"):
        read_prompt(str(file))
    file.write_text("\n{chunks}\n")
    with pytest.raises(UsageError, match=r"p\.txt.*\{question\}"):
        read_prompt(str(file))
    file.write_text(f"\n{PROMPT}\n\n")
    assert read_prompt(str(file)) == PROMPT


def test_a_models_own_prompt_is_its_default(tmp_path: Path) -> None:
    assert Wording.of(tmp_path) == Wording(DEFAULT)
    (tmp_path / OWN_FILE).write_text("Own {chunks} {question}\n")
    assert Wording.of(tmp_path) == Wording("Own {chunks} {question}")
    assert Wording.of(tmp_path, PROMPT) == Wording(PROMPT)
    assert [w.source(tmp_path) for w in (Wording.of(tmp_path), Wording.of(tmp_path, PROMPT))] == [
        f"the model's {OWN_FILE}",
        "--prompt",
    ]


def test_differences_are_flags() -> None:
    mine = Wording.of(Path("nowhere"), PROMPT, "Be terse.", ["enable_thinking=true"])
    assert mine.differences(Wording()) == [
        (f"--prompt {PROMPT[:45] + '...'!r}", "no --prompt"),
        ("--system 'Be terse.'", "no --system"),
        ("--template-var enable_thinking=true", "no --template-var enable_thinking"),
    ]
    assert Wording().differences(mine)[0] == ("no --prompt", f"--prompt {PROMPT[:45] + '...'!r}")
    assert mine.differences(mine) == []
