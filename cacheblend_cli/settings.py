"""Settings: flag > CACHEBLEND_* > project cacheblend.toml > user config > default. An unknown key is an error."""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from platformdirs import user_config_path, user_data_path

from cacheblend_cli.errors import NotFoundError, UsageError
from cacheblend_cli.text_files import check_text

FILE = "cacheblend.toml"
_ENV = "CACHEBLEND_"
API_KEY_VARIABLE = "CACHEBLEND_API_KEY"
"""Keys of `serve`: a secret, so it is not a setting, which `config show` prints."""


def _setting(default: Any, help: str = "", *, shown: str | bool = True, flag: str = "") -> Any:
    """A field whose flag, where a command has one, shows this. shown: the default in words, False for none, True for itself,
    where it is not empty or off. flag: what the flag is called, where that is not the field's name; with a short form before
    it, as "-k --top-k"."""
    return field(default=default, metadata={"help": help, "shown": shown, "flag": flag})


@dataclass(frozen=True)
class Settings:
    """Every setting with its default and the help of its flag. model "" is SmolLM2 where it is installed, else the handbook's; seed and threads None:
    not fixed; ratio: a number or "auto", which is ratio_floor at least.

    max_size "": the quota the store has. force_store: accept a store on a network filesystem, or of another owner."""

    model: str = _setting(
        "",
        "Model directory, .gguf file, hub id, smollm2 or handbook. Default: smollm2 where it is installed, else handbook.",
    )
    lora: str = _setting("", "Directory of a LoRA adapter (peft's files), merged into the model.")
    store: str = _setting("", "Directory of the store.")
    chunk_tokens: int = _setting(512, "Tokens of a chunk at most.")
    collection: str = _setting("", "Only documents of this collection.")
    overlap: int = _setting(0, "Tokens at most that a chunk repeats of the text before it.")
    context: str = _setting(
        "document",
        "Of documents stored in several contexts: sink, document or neighbours, else the first there is of document, "
        "neighbours, sink.",
    )
    window: int = _setting(2048, "Tokens of a chunk with the document or neighbours before it, at most.")
    neighbours: int = _setting(3, "Similar chunks that neighbours takes.")
    kv_dtype: str = _setting(
        "auto",
        "How KV is stored: auto (as computed), float32, bfloat16, float16, float8_e4m3, int8 or int4.",
        shown=False,
    )
    device: str = _setting("auto", "auto, cpu, cuda or cuda:N.", shown=False)
    dtype: str = _setting("auto", "auto, float32, bfloat16 or float16.", shown=False)
    weight_dtype: str = _setting("auto", "auto, or int8: faster on a CPU, less exact.", shown=False)
    attention_backend: str = _setting("auto", "auto, torch, triton or xformers.", shown=False)
    prompt: str = _setting("", "File with the prompt's wording, with {chunks} and {question} in it.")
    system: str = _setting("", "The system prompt.")
    template_var: tuple[str, ...] = _setting(
        (), "Tell the chat template something: NAME=VALUE, as enable_thinking=true (repeatable)."
    )
    mode: str = _setting("blend", "blend, full (no reuse) or reuse (no repair).")
    ratio: float | str = _setting(
        0.15,
        "Share of the inexact tokens to recompute, or auto: as many as loading hides, and all where a full prefill is faster.",
    )
    ratio_floor: float = _setting(0.15, "The least that --ratio auto recomputes.")
    selector: str = _setting("query", "query, hkvd, first, draft, perturb, random, all, none, or first:4+query.")
    deviation: str = _setting("k", "What hkvd compares: v, k or kv.")
    check_layer: int = _setting(1, "The layer at which hkvd and perturb choose.")
    block: int = _setting(1, "Choose runs of this many tokens.")
    nucleus: float = _setting(0.0, "Stop when this share of the scores' sum is covered; 0 is off.")
    gradual: str = _setting("", "Several check layers, each keeping a smaller share, as 1:0.3,4:0.15.")
    probe_layers: str = _setting("", "Layers that query and draft look at: FIRST-LAST.", shown="the middle half")
    draft_tokens: int = _setting(8, "Answer tokens that draft looks ahead.")
    correction: str = _setting("regression", "Move what is not recomputed by what is: regression, mean-shift or none.")
    max_risk: float | None = _setting(None, "Go on with a full prefill above this risk (eval --fit-risk).")
    max_tokens: int = _setting(128, "Tokens of the answer at most.")
    reasoning_tokens: int = _setting(1024, "Tokens that a model may take to reason, beside --max-tokens.")
    temperature: float = _setting(0.0, "0 is greedy.")
    top_p: float = _setting(1.0, "Nucleus sampling.")
    top_k: int = _setting(5, "Chunks to search for without --chunks.", flag="--top-k -k")
    search: str = _setting("auto", "words, meaning or both; auto: both where there are embedding weights.")
    embeddings: str = _setting(
        "",
        "Weights for meaning: a model2vec directory or hub id, or a sentence-transformers directory. Default: wordllama's, where it is installed.",
    )
    min_score: float = _setting(0.0, "Leave out hits whose score is below this.", shown=False)
    expand: int = _setting(0, "Take so many chunks before and after each hit, too.")
    order: str = _setting(
        "exact",
        "Of searched documents: rank (the best hit first), or exact (first the one that then needs the least repair).",
    )
    sample_top_k: int = _setting(0, "Sample among the k likeliest; 0 is off.")
    min_p: float = _setting(0.0, "Drop tokens below this share of the likeliest.")
    repetition_penalty: float = _setting(1.0, "Divide the logits of what was said by this; 1 is off.")
    presence_penalty: float = _setting(0.0, "Take this off what the answer has said; 0 is off.")
    frequency_penalty: float = _setting(0.0, "Take this off what the answer has said, for each time; 0 is off.")
    model_sampling: bool = _setting(
        False,
        "Sample as the model's generation_config.json says, but for what is set here.",
        flag="--model-sampling/--no-model-sampling",
    )
    seed: int | None = _setting(None, "Seed of the sampling.")
    lock_timeout: float = _setting(30.0, "Seconds to wait for another writer of the store.")
    force_store: bool = False
    max_size: str = _setting(
        "",
        "Quota of the store for KV and text, such as 20GB: the least recently used KV is removed, documents' text stays. 0: none.",
    )
    salt: str = _setting("", "Keep the chunks of this tenant apart.")
    threads: int | None = _setting(None, "CPU threads.")
    block_size: int = 64
    gpu_memory_utilization: float = _setting(0.9, "Share of a GPU's memory to use, weights included.")
    eager: bool = _setting(False, "Decode without CUDA graphs.", flag="--eager")
    kv_pool_dtype: str = _setting(
        "auto", "What KV is kept in while a question is answered: auto (as computed) or float8_e4m3.", shown=False
    )

    @property
    def store_path(self) -> Path:
        """The named store; else ./.cacheblend/store when .cacheblend is there; else the user's data directory."""
        if self.store:
            return Path(self.store).expanduser()
        if Path(".cacheblend").is_dir():
            return Path(".cacheblend/store")
        return user_data_path("cacheblend") / "store"


GROUPS: dict[str, tuple[str, ...]] = {
    "search": ("top_k", "search", "embeddings", "min_score", "expand", "context", "collection", "order"),
    "blend": (
        "mode", "ratio", "ratio_floor", "selector", "gradual", "max_risk", "deviation", "check_layer", "block", "nucleus", "probe_layers",
        "draft_tokens", "correction",
    ),
    "sampling": (
        "max_tokens", "reasoning_tokens", "temperature", "top_p", "sample_top_k", "min_p", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "model_sampling", "seed",
    ),
    "prompt": ("prompt", "system", "template_var"),
    "model": ("model", "lora"),
    "machine": ("device", "dtype", "weight_dtype", "attention_backend", "threads"),
    "memory": ("kv_dtype", "kv_pool_dtype", "gpu_memory_utilization", "eager", "block_size"),
    "tenant": ("salt",),
    "cutting": ("chunk_tokens", "window", "overlap", "neighbours"),
    "store": ("store", "lock_timeout", "force_store", "max_size"),
}  # fmt: skip
"""Every setting by what it is about: commands take their flags from here, and what makes an engine another one is told so."""


def grouped(*groups: str, but: Sequence[str] = ()) -> tuple[str, ...]:
    """The names of the settings of these groups, in order."""
    return tuple(name for group in groups for name in GROUPS[group] if name not in but)


T = TypeVar("T")


@dataclass(frozen=True)
class Resolved:
    """Settings and where each value came from: "default", a file, an environment variable or "flag"."""

    settings: Settings
    origin: Mapping[str, str]


def _kind(hint: Any) -> type:
    """The type a setting's value has when it is given."""
    kind: type = get_args(hint)[0] if isinstance(hint, UnionType) else get_origin(hint) or hint
    return kind


_FIELDS = {name: _kind(hint) for name, hint in get_type_hints(Settings).items()}
DEFAULTS = Resolved(Settings(), dict.fromkeys(_FIELDS, "default"))
_LEAST = {"top_k": 1, "expand": 0, "threads": 1, "lock_timeout": 0, "seed": -(2**63)}  # what no other place checks
_MOST = {"threads": 4096, "expand": 10_000}  # other whole numbers: what 64 bits hold
_WORDS = {"ratio": "auto"}  # what can stand where a number is wanted
_BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
PATHS = ("store", "model", "lora", "prompt", "embeddings")  # in a file they are relative to it


def resolve(flags: Mapping[str, Any]) -> Resolved:
    """Put the layers together; a flag of None, or of no values, was not given. Raises UsageError naming the place of a bad value."""
    values: dict[str, Any] = {}
    origin = dict(DEFAULTS.origin)
    for path in config_files():
        if path.is_file():
            _merge(values, origin, _read(path), str(path), path.parent)
    for variable, text in os.environ.items():
        if variable.startswith(_ENV) and variable != API_KEY_VARIABLE and text:  # an empty variable is an unset one
            _merge(values, origin, {variable.removeprefix(_ENV).lower(): _Text(text)}, variable)
    _merge(values, origin, {k: v for k, v in flags.items() if v is not None and v != []}, "flag")
    return Resolved(Settings(**values), origin)


def parse_setting(key: str, texts: Sequence[str]) -> tuple[str, Any]:
    """The name of a setting as a file has it, and the value that was typed for it. Raises UsageError."""
    name = key.replace("-", "_")
    if name not in _FIELDS:
        raise UsageError(f"unknown setting {key!r}", f"known: {', '.join(_FIELDS)}")
    if _FIELDS[name] is tuple:
        return name, list(texts)
    if len(texts) != 1:
        raise UsageError(f"{key} takes one value, and {len(texts)} were given", "put text with blanks into quotes")
    return name, _convert(name, _Text(texts[0]), "flag")


def config_files() -> list[Path]:
    """The user's file and the project's, the latter stronger: the nearest cacheblend.toml from the working directory up
    to the root of its repository or the home directory."""
    files = [user_config_path("cacheblend") / "config.toml"]
    try:
        here = Path.cwd()
    except FileNotFoundError:
        raise NotFoundError("the directory that this was started in is gone", "cd to one that is there") from None
    for folder in (here, *here.parents):
        if (folder / FILE).is_file():
            return [*files, folder / FILE]
        if (folder / ".git").exists() or folder == Path.home():
            break
    return files


def of_settings(kind: type[T], settings: Settings, **others: Any) -> T:
    """A dataclass whose fields are settings of the same names; others: what else it has, or has otherwise."""
    own = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    taken = {f.name: getattr(settings, f.name) for f in fields(settings) if f.name in own}
    return kind(**taken | others)


class _Text(str):
    """A value that can only be text where it was written: "5" is a number then."""


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}", "mend or remove it") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "check its permissions") from error


def _merge(
    values: dict[str, Any], origin: dict[str, str], layer: Mapping[str, Any], place: str, folder: Path | None = None
) -> None:
    for key, value in layer.items():
        name = key.replace("-", "_")
        if name not in _FIELDS:
            raise UsageError(f"unknown setting {key!r} in {place}", f"known: {', '.join(_FIELDS)}")
        values[name] = _convert(name, value, place)
        if folder is not None and name in PATHS:
            values[name] = _beside(folder, name, values[name])
        origin[name] = place


def _convert(name: str, value: Any, place: str) -> Any:
    kind = _FIELDS[name]
    shown = f"--{name.replace('_', '-')}" if place == "flag" else f"{name} in {place}"
    if name in _WORDS:
        if value == _WORDS[name]:
            return str(value)
        if place == "flag" and isinstance(value, str):  # such a flag takes words, so it comes as text
            value = _Text(value)
    if kind is tuple:
        return _texts(value, shown)
    fits = isinstance(value, kind) or (kind is float and isinstance(value, int)) or isinstance(value, _Text)
    try:
        if not fits or (isinstance(value, bool) and kind is not bool):
            raise ValueError
        converted = _BOOLS[value.lower()] if kind is bool and isinstance(value, _Text) else kind(value)
        if isinstance(converted, float) and not math.isfinite(converted):
            raise ValueError
    except (ValueError, KeyError):
        hint = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}[kind]
        hint += f" or {_WORDS[name]}" if name in _WORDS else ""
        raise UsageError(f"{shown} is {value!r}, and {hint} is wanted", "see: cacheblend config show") from None
    if kind is str and name not in PATHS:
        check_text(value, shown)
    if kind is int and converted > (most := _MOST.get(name, 2**63 - 1)):
        raise UsageError(f"{shown} is {value!r}, and {most} is the most", "see: cacheblend config show")
    if name in _LEAST and converted < _LEAST[name]:
        raise UsageError(f"{shown} is {value!r}, and {_LEAST[name]} is the least", "see: cacheblend config show")
    return converted


def _texts(value: Any, shown: str) -> tuple[str, ...]:
    """Of a list, or of a variable with commas."""
    values = value.split(",") if isinstance(value, _Text) else value
    if not isinstance(values, list | tuple) or not all(isinstance(v, str) for v in values):
        raise UsageError(f"{shown} is {value!r}, and a list of text is wanted", "see: cacheblend config show")
    return tuple(v.strip() for v in values)


def _beside(folder: Path, name: str, value: str) -> str:
    """A path in a file is meant from that file. What could be a hub id is one unless the directory is there."""
    path = Path(value).expanduser()
    if name in ("model", "embeddings") and not (
        value.startswith(("./", "../", "~")) or (folder / path).is_dir() or path.suffix == ".gguf"
    ):
        return value
    return str(folder / path) if value else value
