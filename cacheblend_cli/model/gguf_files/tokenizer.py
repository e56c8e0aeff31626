"""The tokenizer and chat template of a GGUF file, written as transformers writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, pre_tokenizers

from cacheblend_cli.errors import UsageError

SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
ENDS = ("eos", "eot", "eom")  # tokens that end an answer
# How a text is cut before its pieces are merged (`tokenizer.ggml.pre`): as GPT-2 does, as it does after every digit
# stands alone, and as Llama 3 does. transformers knows others, and takes GPT-2's way for all that it does not know.
LIKE_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling")
DIGITS_ALONE = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
LIKE_LLAMA3 = ("glm4", "chatglm-bpe")


def write_tokenizer(file: Path, metadata: Mapping[str, Any], folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json into `folder`.

    Raises UsageError for a tokenizer of another kind.
    """
    # not AutoTokenizer, which wants a config, and reads that of few architectures
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    pre = _check_pre(metadata)
    try:
        backend = PreTrainedTokenizerFast.from_pretrained(str(file.parent), gguf_file=file.name).backend_tokenizer
    except Exception as error:  # whatever a damaged or unknown vocabulary leads to
        raise UsageError(
            f"the tokenizer of {file} ({metadata.get('tokenizer.ggml.model')!r}) cannot be read: {error}",
            "use another model, or its checkpoint with safetensors weights",
        ) from error
    if pre in DIGITS_ALONE:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif pre in LIKE_LLAMA3:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        cut = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"]), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([cut, byte_level])
    backend.save(str(folder / "tokenizer.json"))
    tokens = {name: _token(metadata, backend, kind) for name, kind in SPECIAL.items()}
    _write_json(folder / "tokenizer_config.json", {name: token for name, token in tokens.items() if token is not None})
    if template := metadata.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    ends = {i for kind in ENDS if (i := metadata.get(f"tokenizer.ggml.{kind}_token_id")) is not None}
    if ends:
        _write_json(folder / "generation_config.json", {"eos_token_id": sorted(ends)})


def _check_pre(metadata: Mapping[str, Any]) -> str | None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    pre = metadata.get("tokenizer.ggml.pre")
    known = sorted({*LIKE_GPT2, *DIGITS_ALONE, *LIKE_LLAMA3, *GGUF_PRE_TOKENIZER_SPLITS})
    if metadata.get("tokenizer.ggml.model") == "gpt2" and pre not in known:
        raise UsageError(
            f"the GGUF file cuts text in a way that is not known (tokenizer.ggml.pre = {pre!r})",
            f"known: {', '.join(known)}",
        )
    return pre


def _token(metadata: Mapping[str, Any], backend: Any, kind: str) -> str | None:
    token_id = metadata.get(f"tokenizer.ggml.{kind}_token_id")
    return None if token_id is None else backend.id_to_token(token_id)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
