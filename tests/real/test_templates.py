"""Published chat templates: the prompt is what transformers renders, or both refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import text_tokenizers
from real_packages import FOLDER, llama_cpp_models
from transformers.utils.chat_template_utils import render_jinja_template

from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.tokenizer import Tokenizer
from cacheblend_cli.prompt.template import split_template
from cacheblend_cli.prompt.wording import Wording

pytestmark = pytest.mark.real
NAMES = sorted(file.stem for file in (FOLDER / "llama.cpp" / "models" / "templates").glob("*.jinja"))
CHUNKS, QUESTION, SYSTEM = "Mara leads billing.\n\n<b>Jonas</b> keeps a parrot.", "Who leads billing?", "Be brief."


@pytest.mark.parametrize("system", ["", SYSTEM], ids=["plain", "system"])
@pytest.mark.parametrize("name", NAMES or ["none"])
def test_the_prompt_is_what_transformers_renders(name: str, system: str, tmp_path: Path) -> None:
    source = (llama_cpp_models() / "templates" / f"{name}.jinja").read_text()
    text_tokenizers.write_text_tokenizer(tmp_path, "byte-level")
    (tmp_path / "chat_template.jinja").write_text(source)
    tokenizer = Tokenizer(tmp_path)
    wording = Wording(prompt="{chunks}\n\n{question}", system=system)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": f"{CHUNKS}\n\n{QUESTION}"})
    expected = rendered(tokenizer, source, messages)
    if expected is None:
        with pytest.raises(UsageError, match="chat template"):
            split_template(tokenizer, wording)
        return
    template = split_template(tokenizer, wording)
    assert expected == template.before_chunks + CHUNKS + template.before_question + QUESTION + template.after_question


def rendered(tokenizer: Tokenizer, source: str, messages: list[dict[str, str]]) -> str | None:
    """Return what transformers renders; None if the template refuses."""
    given: dict[str, Any] = {
        name: json.loads(json.dumps(tokenizer.special(name))) for name in ("bos_token", "eos_token")
    }
    try:
        texts, _ = render_jinja_template(
            conversations=[messages],
            chat_template=source,
            add_generation_prompt=True,
            enable_thinking=False,
            thinking=False,
            **given,
        )
    except Exception:  # whatever the template raises
        return None
    return str(texts[0])
