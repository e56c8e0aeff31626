"""The tokenizer and chat template of a GGUF file, written in transformers' format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cacheblend_store.private_files import create
from tokenizers import Regex, normalizers, pre_tokenizers

from cacheblend_cli.errors import UsageError

SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
MARK = "\u2581"  # SentencePiece's mark for a space
ENDS = ("eos", "eot", "eom")  # tokens that end an answer
# Text splitting before merges (`tokenizer.ggml.pre`), where transformers lacks the name: as GPT-2 does; the same
# after splitting off every digit; as Llama 3 does; or by patterns applied in turn. transformers treats every unknown
# name as GPT-2.
LIKE_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling")
DIGITS_ALONE = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
LIKE_LLAMA3 = ("glm4", "chatglm-bpe")
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
IN_TURN = {
    "deepseek-llm": (
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _CJK,
        r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}
"""Patterns by name; "default" is for files without a name."""
WORDS_FIRST = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    *("tekken", "glm4", "glm5", "youtu"),
)
"""Vocabularies that match whole words before merges (`ignore_merges`)."""


def write_tokenizer(file: Path, metadata: Mapping[str, Any], folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json to `folder`. Raises
    UsageError for an unsupported kind of tokenizer."""
    # AutoTokenizer needs a config, and reads few architectures
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    kind, pre = metadata.get("tokenizer.ggml.model"), _pre(metadata)
    try:
        backend = PreTrainedTokenizerFast.from_pretrained(str(file.parent), gguf_file=file.name).backend_tokenizer
    except Exception as error:  # a damaged or unknown vocabulary can raise anything
        raise UsageError(
            f"the tokenizer of {file} ({kind!r}) cannot be read: {error}",
            "use another model, or its checkpoint with safetensors weights",
        ) from error
    if kind == "gpt2":
        _set_pre_tokenizer(backend, pre, GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"])
    elif kind == "llama":
        _set_space_prefix(backend, metadata.get("tokenizer.ggml.add_space_prefix", True))
    data = json.loads(backend.to_str())
    if pre in WORDS_FIRST:
        data["model"]["ignore_merges"] = True
    _write_json(folder / "tokenizer.json", data)
    named = {name: metadata.get(f"tokenizer.ggml.{kind}_token_id") for name, kind in SPECIAL.items()}
    tokens = {name: backend.id_to_token(token_id) for name, token_id in named.items() if token_id is not None}
    _write_json(folder / "tokenizer_config.json", {name: token for name, token in tokens.items() if token is not None})
    if template := metadata.get("tokenizer.chat_template"):
        create(folder / "chat_template.jinja", template.encode())
    ends = {i for kind in ENDS if (i := metadata.get(f"tokenizer.ggml.{kind}_token_id")) is not None}
    if ends:
        _write_json(folder / "generation_config.json", {"eos_token_id": sorted(ends)})


def _pre(metadata: Mapping[str, Any]) -> str:
    """Return the name of the file's text splitting. Raises UsageError for an unknown one."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    pre = str(metadata.get("tokenizer.ggml.pre") or "default")
    known = sorted({*LIKE_GPT2, *DIGITS_ALONE, *LIKE_LLAMA3, *IN_TURN, *GGUF_PRE_TOKENIZER_SPLITS})
    if metadata.get("tokenizer.ggml.model") == "gpt2" and pre not in known:
        raise UsageError(
            f"the GGUF file splits text in an unknown way (tokenizer.ggml.pre = {pre!r})", f"known: {', '.join(known)}"
        )
    return pre


def _set_pre_tokenizer(backend: Any, pre: str, like_llama3: str) -> None:
    """Replace the pre-tokenizer of a byte-level vocabulary where transformers does not know `pre`."""
    if pre in DIGITS_ALONE:
        cuts: list[Any] = [pre_tokenizers.Digits(individual_digits=True)]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif pre in LIKE_LLAMA3 or pre in IN_TURN:
        patterns = IN_TURN.get(pre, (like_llama3,))
        cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        return
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])


def _set_space_prefix(backend: Any, prefix: bool) -> None:
    """Make a SentencePiece vocabulary put a space before every run of text (even one with a space), or none."""
    replace = normalizers.Replace(" ", MARK)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(MARK), replace]) if prefix else replace
    backend.pre_tokenizer = None


def _write_json(path: Path, content: dict[str, Any]) -> None:
    # These bytes are the tokenizer's fingerprint: with another layout, stored chunks would not be found.
    create(path, json.dumps(content, indent=2).encode())
