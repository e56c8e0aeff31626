"""Tokenizers of every kind found in checkpoints, trained on a few words: text splitting and decoding."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from cacheblend_cli.model.tokenizer import Tokenizer

SCRIPTS = {
    "latin": "Who leads billing? It's  Mara\u2026 na\u00efve caf\u00e9",
    "cyrillic": "\u041a\u0442\u043e \u0432\u0435\u0434\u0451\u0442 \u0441\u0447\u0435\u0442\u0430?",
    "greek": "\u03a0\u03bf\u03b9\u03bf\u03c2 \u03b7\u03b3\u03b5\u03af\u03c4\u03b1\u03b9;",
    "hebrew": "\u05de\u05d9 \u05de\u05d5\u05d1\u05d9\u05dc?",
    "arabic": "\u0645\u064e\u0646 \u064a\u0642\u0648\u062f \u0627\u0644\u0641\u0648\u062a\u0631\u0629\u061f",
    "devanagari": "\u092c\u093f\u0932\u093f\u0902\u0917 \u0915\u094c\u0928 \u0938\u0901\u092d\u093e\u0932\u0924\u093e \u0939\u0948?",
    "thai": "\u0e43\u0e04\u0e23\u0e40\u0e1b\u0e47\u0e19\u0e2b\u0e31\u0e27\u0e2b\u0e19\u0e49\u0e32",
    "chinese": "\u8c01\u8d1f\u8d23\u8d26\u5355\uff1f\U00020bb7",
    "japanese": "\u8acb\u6c42\u306e\u62c5\u5f53\u306f\u3060\u308c",
    "korean": "\uccad\uad6c\ub294 \ub204\uac00 \u1100\u1161?",
    "amharic": "\u121b\u1295 \u12ed\u1218\u122b\u120d\u1362",
    "emoji": "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd \U0001f1e9\U0001f1ea \u2764\ufe0f\U0001f3f4\u200d\u2620\ufe0f",
}
WORDS = (
    "the lead of billing is Mara and she works in Bergen, while Jonas keeps a parrot. Who? Documents: Question Answer"
)
TRAINING = [WORDS] * 4 + [SCRIPTS["cyrillic"], SCRIPTS["devanagari"][:9], SCRIPTS["chinese"][:2], "\n  a\tb\n\n"]
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]"]
MARK = "\u2581"  # what SentencePiece writes for a space


def _bpe(**options: Any) -> Callable[..., tokenizers.Tokenizer]:
    def make(**parts: Any) -> tokenizers.Tokenizer:
        return _trained(tokenizers.Tokenizer(models.BPE(**options)), trainers.BpeTrainer, **parts)

    return make


def _trained(tokenizer: tokenizers.Tokenizer, trainer: Any, **parts: Any) -> tokenizers.Tokenizer:
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    alphabet = pre_tokenizers.ByteLevel.alphabet() if _is_byte_level(tokenizer) else []
    extra = {"unk_token": "<unk>"} if trainer is trainers.UnigramTrainer else {}
    tokenizer.train_from_iterator(
        TRAINING,
        trainer(vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False, **extra),
    )
    tokenizer.add_tokens(["<tool_call>"])
    return tokenizer


def _is_byte_level(tokenizer: tokenizers.Tokenizer) -> bool:
    return type(tokenizer.decoder) is decoders.ByteLevel


def _with_bytes(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The BPE tokenizer with 256 byte tokens to fall back to, as Llama 2 has them."""
    data = json.loads(tokenizer.to_str())
    vocab = data["model"]["vocab"]
    added = {t["content"]: t for t in data["added_tokens"]}
    size = max([*vocab.values(), *(t["id"] for t in added.values())]) + 1
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = size + byte
    data["model"] |= {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    return tokenizers.Tokenizer.from_str(json.dumps(data))


def _byte_level(prefix_space: bool = False) -> tokenizers.Tokenizer:
    return _bpe()(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=prefix_space), decoder=decoders.ByteLevel())


def _llama2_decoder(strip: bool = True) -> Any:
    stages = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*stages, decoders.Strip(" ", 1, 0)] if strip else stages)


def _legacy() -> tokenizers.Tokenizer:
    """As transformers 4 converts Llama 2, TinyLlama and the first Mistral: every run between control tokens gets a
    mark."""
    normalizer = normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)])
    return _with_bytes(_bpe(unk_token="<unk>")(normalizer=normalizer, decoder=_llama2_decoder()))


def _metaspace(scheme: str) -> tokenizers.Tokenizer:
    """As transformers 5 converts them: the text's beginning (or every run) gets a mark."""
    marks = pre_tokenizers.Metaspace(MARK, prepend_scheme=scheme, split=False)
    return _with_bytes(_bpe(unk_token="<unk>")(pre_tokenizer=marks, decoder=_llama2_decoder()))


def _gemma() -> tokenizers.Tokenizer:
    return _with_bytes(
        _bpe(unk_token="<unk>")(normalizer=normalizers.Replace(" ", MARK), decoder=_llama2_decoder(strip=False))
    )


def _joins_lines() -> tokenizers.Tokenizer:
    """What it writes for two empty lines depends on whether they come together."""
    stages = [normalizers.Replace(Regex("\n{2,}"), "\n"), normalizers.Replace(" ", MARK)]
    return _with_bytes(
        _bpe(unk_token="<unk>")(normalizer=normalizers.Sequence(stages), decoder=_llama2_decoder(strip=False))
    )


def _unigram() -> tokenizers.Tokenizer:
    """As T5 and XLM-R: no bytes to fall back to, and the Metaspace decoder."""
    marks = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(MARK, prepend_scheme="always")])
    return _trained(
        tokenizers.Tokenizer(models.Unigram()),
        trainers.UnigramTrainer,
        pre_tokenizer=marks,
        decoder=decoders.Metaspace(MARK, prepend_scheme="always"),
    )


def _word_piece() -> tokenizers.Tokenizer:
    return _trained(
        tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>")),
        trainers.WordPieceTrainer,
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        decoder=decoders.WordPiece(cleanup=True),
    )


def _bpe_with_ends() -> tokenizers.Tokenizer:
    """As the first GPT: a mark at a word's end."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.WhitespaceSplit(), decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    return tokenizer


def _without_decoder() -> tokenizers.Tokenizer:
    return _bpe(unk_token="<unk>")(pre_tokenizer=pre_tokenizers.Whitespace())


def _with_odd_decoder() -> tokenizers.Tokenizer:
    """A decoder that depends on the whole text, so that no part is final before the end."""
    stages = [decoders.Replace(MARK, " "), decoders.Fuse(), decoders.Replace("is", "IS"), decoders.Strip(" ", 2, 0)]
    return _bpe(unk_token="<unk>")(normalizer=normalizers.Replace(" ", MARK), decoder=decoders.Sequence(stages))


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-level": _byte_level,
    "byte-level-prefix-space": lambda: _byte_level(prefix_space=True),
    "llama2-legacy": _legacy,
    "metaspace-first": lambda: _metaspace("first"),
    "metaspace-always": lambda: _metaspace("always"),
    "gemma": _gemma,
    "joins-lines": _joins_lines,
    "unigram-metaspace": _unigram,
    "word-piece": _word_piece,
    "bpe-word-ends": _bpe_with_ends,
    "no-decoder": _without_decoder,
    "odd-decoder": _with_odd_decoder,
}
BYTE_KINDS = ("byte-level", "byte-level-prefix-space", "llama2-legacy", "metaspace-first", "metaspace-always", "gemma")
"""Those that lose no text."""


def write_text_tokenizer(folder: Path, kind: str, template: str | None = None) -> None:
    """tokenizer.json of that kind, and a configuration with the template."""
    folder.mkdir(parents=True, exist_ok=True)
    KINDS[kind]().save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def text_tokenizer(folder: Path, kind: str, template: str | None = None) -> Tokenizer:
    write_text_tokenizer(folder, kind, template)
    return Tokenizer(folder)
