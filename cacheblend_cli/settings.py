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

from cacheblend_store.private_files import read_regular
from platformdirs import user_config_path, user_data_path

from cacheblend_cli import trust
from cacheblend_cli.errors import NotFoundError, UsageError, did_you_mean
from cacheblend_cli.text_files import check_text, decode_text, reading

FILE = "cacheblend.toml"
_ENV = "CACHEBLEND_"
_MOST_BYTES = 64 << 10  # of a settings file
_MOST_DOTS = 512  # in a line: the time for a dotted key is quadratic in its parts
API_KEY_VARIABLE = "CACHEBLEND_API_KEY"
"""Environment variable with the API keys of `serve`. Not a setting, because `config show` would print the secret."""
KV_DTYPES = ("auto", "exact", "float8_e4m3", "int7", "int4")
"""Storage formats of KV: auto (int7), exact (as computed), or a codec."""
REMOVED_KV_DTYPES = {
    **dict.fromkeys(("float32", "bfloat16", "float16"), "exact"),
    **{"int8": "int7", "int6": "int7", "int3": "int4", "float8_e5m2": "float8_e4m3"},
}
"""Storage formats of earlier versions -> the one to use."""


def _setting(
    default: Any, help: str = "", *, shown: str | bool = True, flag: str = "", least: int | None = None, most: int = 2**63 - 1,
    choices: tuple[str, ...] = (),
) -> Any:  # fmt: skip
    """Return a dataclass field with the metadata of its flag.

    shown: default in --help: a text, False to hide it, True to show the value unless it is empty or off.
    flag: names of the flag if they differ from the field's, such as "--top-k -k".
    least, most: bounds of a number, if nothing else checks them. choices: all values of a setting that is a name.
    """
    bounds = {"least": least, "most": most, "choices": choices}
    return field(default=default, metadata={"help": help, "shown": shown, "flag": flag, **bounds})


@dataclass(frozen=True)
class Settings:
    """All settings, each with its default and the help text of its flag."""

    # "": SmolLM2 if it is installed
    model: str = _setting(
        "", "Model directory, GGUF file, Hugging Face id, smollm2 or handbook.", shown="smollm2, if installed"
    )
    lora: str = _setting("", "Directory of a LoRA adapter (peft format), merged into the weights.")
    store: str = _setting("", "Directory of the store.")
    chunk_tokens: int = _setting(512, "Maximum tokens of a chunk.")
    collection: str = _setting("", "Only documents of this collection.")
    overlap: int = _setting(0, "Maximum tokens of the preceding text that a chunk repeats.")
    state_every: int = _setting(
        1, "For models with recurrent layers: store their state for every N-th chunk, and for a document's last one."
    )
    ocr_languages: str = _setting("eng", "Languages for --ocr, as tesseract names them, such as deu+eng.")
    context: str = _setting(
        "document",
        "Prefer KV stored with this left context: document, neighbours or sink; else use another one.",
        choices=("sink", "document", "neighbours"),
    )
    window: int = _setting(2048, "Maximum tokens of a chunk and the text before it.")
    neighbours: int = _setting(3, "Number of similar chunks for --context neighbours.")
    kv_dtype: str = _setting(
        "auto",
        "Storage format of KV: auto (int7), exact (as computed), float8_e4m3, int7 or int4.",
        shown=False,
        choices=KV_DTYPES,
    )
    device: str = _setting("auto", "auto, cpu, cuda, cuda:N or mps.", shown=False)
    dtype: str = _setting(
        "auto",
        "auto, float32, bfloat16 or float16.",
        shown=False,
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    weight_dtype: str = _setting(
        "auto",
        "auto: as in the file; int8, int4: quantised once, on a CPU.",
        shown=False,
        choices=("auto", "int8", "int4"),
    )
    attention_backend: str = _setting(
        "auto", "auto, torch, triton or xformers.", shown=False, choices=("auto", "torch", "triton", "xformers")
    )
    prompt: str = _setting("", "File with the prompt's wording, containing {chunks} and {question}.")
    system: str = _setting("", "System prompt.")
    template_var: tuple[str, ...] = _setting(
        (), "Variable of the chat template: NAME=VALUE, such as enable_thinking=true (repeatable)."
    )
    speculate: int | str = _setting(
        "auto",
        "Tokens to propose in each decode step, by looking up the last ones in the prompt and the answer; off; or auto: on a CPU, as many as make it faster.",
        least=1,
        most=64,
    )
    mode: str = _setting(
        "blend", "blend, full (reuse nothing) or reuse (recompute nothing).", choices=("blend", "full", "reuse")
    )
    ratio: float | str = _setting(
        "model",
        "Share of the reused, inexact tokens to recompute; model: the share that models check measured for this model, or 0.15; "
        "auto: as many as fit into the loading time, or a full prefill if that is faster.",
    )
    ratio_floor: float = _setting(0.15, "Lower bound of --ratio auto.", least=0, most=1)
    selector: str = _setting("query", "query, hkvd, first, random, all, none, or first:4+query.")
    deviation: str = _setting("k", "Tensors that hkvd compares: v, k or kv.", choices=("v", "k", "kv"))
    check_layer: int = _setting(1, "Layer at which hkvd chooses tokens.")
    block: int = _setting(1, "Recompute runs of N tokens instead of single ones.")
    gradual: str = _setting("", "Several check layers with decreasing ratios, such as 1:0.3,4:0.15.")
    probe_layers: str = _setting("", "Layers that query observes: FIRST-LAST.", shown="the middle half")
    correction: str = _setting(
        "regression", "Correct the KV of other tokens by regression, or none.", choices=("regression", "none")
    )
    kl_mean: float = _setting(
        0.03, "models check: accept a ratio up to this mean KL to a full prefill, in nats per token.", least=0
    )
    kl_p90: float = _setting(0.08, "models check: the same limit for the 90th percentile over prompts.", least=0)
    max_tokens: int = _setting(128, "Maximum tokens of the answer.")
    reasoning_tokens: int = _setting(1024, "Maximum tokens of reasoning before the answer.")
    temperature: float = _setting(0.0, "Sampling temperature; 0: greedy.")
    top_p: float = _setting(1.0, "Nucleus sampling: share of probability to keep.")
    top_k: int | None = _setting(
        None,
        "Number of chunks to search for.",
        shown="5, without those far below the best",
        flag="--top-k -k",
        least=1,
    )
    search: str = _setting(
        "auto",
        "words, meaning or both; auto: both, if embedding weights are installed.",
        choices=("auto", "words", "meaning", "both"),
    )
    embeddings: str = _setting(
        "", "Embedding weights for meaning: model2vec or sentence-transformers directory, or Hugging Face id."
    )
    min_score: float = _setting(0.0, "Drop hits with a lower score.", shown=False)
    on_weak_match: str = _setting(
        "answer",
        "If nothing stored matches the question well: answer, with a warning, or refuse (exit code 3).",
        choices=("answer", "refuse"),
    )
    on_unsupported: str = _setting(
        "answer",
        "If figures, names or quotations of the answer are not in its sources: answer, confirm (as --confirm does), or refuse (exit code 3).",
        choices=("answer", "confirm", "refuse"),
    )
    expand: int = _setting(0, "Also take this many chunks before and after each hit.", least=0, most=10_000)
    order: str = _setting(
        "exact", "Order of found documents: rank (best first) or exact (least repair).", choices=("rank", "exact")
    )
    retrieve: bool = _setting(
        True,
        "Search the store when a chat names no documents, chunks or search (serve).",
        flag="--retrieve/--no-retrieve",
    )
    allow_origin: tuple[str, ...] = _setting(
        (), "Origin of a browser client on another site, such as https://chat.example; *: all (repeatable)."
    )
    sample_top_k: int = _setting(0, "Sample among the k most likely tokens; 0: off.")
    min_p: float = _setting(0.0, "Drop tokens below this share of the most likely token's probability.")
    repetition_penalty: float = _setting(1.0, "Divide the logits of tokens already in the text by this; 1: off.")
    presence_penalty: float = _setting(0.0, "Subtract this from the logits of tokens already generated; 0: off.")
    frequency_penalty: float = _setting(0.0, "Subtract this once for each time a token was generated; 0: off.")
    stop_repetition: bool = _setting(
        True,
        "End an answer that repeats the same text three times, over 32 tokens or more.",
        flag="--stop-repetition/--no-stop-repetition",
    )
    model_sampling: bool = _setting(
        False,
        "Use the sampling settings of the model's generation_config.json, unless set here.",
        flag="--model-sampling/--no-model-sampling",
    )
    seed: int | None = _setting(None, "Random seed of sampling.", least=-(2**63))
    lock_timeout: float = _setting(30.0, "Seconds to wait for another process that writes to the store.", least=0)
    force_store: bool = False  # accept a store on a network filesystem or of another owner
    # "": keep the store's quota
    max_size: str = _setting(
        "", "Quota of the store, such as 20GB: the least recently used KV is evicted, documents' text stays. 0: none."
    )
    tier: str = _setting(
        "",
        "Shared tier behind the store: s3://BUCKET/PREFIX, gs://, az://, file:///FOLDER. Credentials: environment only.",
    )
    tier_key_file: str = _setting("", "File with the secret to encrypt KV in the tier.")
    tier_deadline: float = _setting(0.05, "Seconds to wait for the tier to report which chunks it has.", least=0)
    salt: str = _setting("", "Keep the chunks of this tenant separate.")
    threads: int | None = _setting(None, "CPU threads.", least=1, most=4096)
    tensor_parallel: int = _setting(
        0,
        "Number of tensor-parallel processes, each on its own GPU or on CPU cores.",
        shown="1, or torchrun's",
        least=0,
        most=1024,
    )
    gpu_memory_utilization: float = _setting(0.9, "Share of the GPU's memory to use, including weights.")
    eager: bool = _setting(False, "Decode without CUDA graphs.", flag="--eager")
    swap_space: float = _setting(
        4.0, "Host memory for the KV of preempted answers, in GiB; KV that does not fit is computed again."
    )
    kv_pool_dtype: str = _setting(
        "auto",
        "Format of KV on the device: auto (as computed) or float8_e4m3.",
        shown=False,
        choices=("auto", "float8_e4m3"),
    )
    keep_alive: str = _setting(
        "", "Answer with a background engine that exits after being idle this long, such as 10m. 0: off."
    )

    @property
    def store_path(self) -> Path:
        """Path of the store: --store, else ./.cacheblend/store if this user made ./.cacheblend, else in user data."""
        if self.store:
            return Path(self.store).expanduser()
        return (trust.project_folder() or user_data_path("cacheblend")) / trust.STORE


GROUPS: dict[str, tuple[str, ...]] = {
    "search": ("top_k", "search", "embeddings", "min_score", "on_weak_match", "on_unsupported", "expand", "context", "collection", "order"),
    "blend": ("mode", "ratio", "selector"),
    "research": ("ratio_floor", "gradual", "deviation", "check_layer", "block", "probe_layers", "correction"),
    "check": ("kl_mean", "kl_p90"),
    "sampling": (
        "max_tokens", "reasoning_tokens", "temperature", "top_p", "sample_top_k", "min_p", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "stop_repetition", "model_sampling", "seed",
    ),
    "prompt": ("prompt", "system", "template_var"),
    "model": ("model", "lora"),
    "machine": (
        "device", "dtype", "weight_dtype", "attention_backend", "threads", "tensor_parallel",
    ),
    "decoding": ("speculate",),
    "memory": ("kv_dtype", "kv_pool_dtype", "gpu_memory_utilization", "swap_space", "eager"),
    "tenant": ("salt",),
    "reading": ("ocr_languages",),
    "cutting": ("chunk_tokens", "window", "overlap", "neighbours", "state_every"),
    "store": ("store", "lock_timeout", "force_store", "max_size"),
    "tier": ("tier", "tier_key_file", "tier_deadline"),
    "start": ("keep_alive",),
    "serve": ("retrieve", "allow_origin"),
}  # fmt: skip
"""Settings by topic. Commands select their flags by group; sockets.py uses the groups that identify an engine."""


def grouped(*groups: str, but: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names of the settings in these groups, in order."""
    return tuple(name for group in groups for name in GROUPS[group] if name not in but)


IDENTITY = (*grouped("prompt", "model"), "device", "dtype", "weight_dtype")
"""Settings of a question that only an engine with the same ones answers. Its other settings are the engine's own."""
REMOVED = ("block_size", "weights_cache_gb", "max_risk", "decode_with", "decode_model")
"""Settings of earlier versions."""
HARMLESS = frozenset(
    grouped(
        "search",
        "blend",
        "research",
        "sampling",
        "prompt",
        "cutting",
        "serve",
        "decoding",
        but=("embeddings", "allow_origin"),
    )
)
"""Settings that change only the answers here. All others (what names a place, a model or a receiver, what uses the
machine or removes stored data) are taken from a project's file only if the user trusts it."""

T = TypeVar("T")


@dataclass(frozen=True)
class Resolved:
    """Settings, and the origin of each value: "default", a file, an environment variable or "flag".

    ignored: settings of a project that is not trusted -> file or folder that sets them. See `trust`.
    problems: errors of files and values that were left out.
    """

    settings: Settings
    origin: Mapping[str, str]
    ignored: Mapping[str, str] = field(default_factory=dict)
    problems: Sequence[UsageError | NotFoundError] = ()

    @property
    def ignored_note(self) -> str:
        """Say what is ignored and how to trust it; "" if nothing is."""
        places, names = list(dict.fromkeys(self.ignored.values())), ", ".join(self.ignored)
        if not places:
            return ""
        subject = f"{' and '.join(places)} {'is' if len(places) == 1 else 'are'} not trusted"
        return f"{subject}: ignored {names}; to accept: cacheblend trust"


def _kind(hint: Any) -> type:
    """Return the type of a setting's value, ignoring None."""
    kind: type = get_args(hint)[0] if isinstance(hint, UnionType) else get_origin(hint) or hint
    return kind


_FIELDS = {name: _kind(hint) for name, hint in get_type_hints(Settings).items()}
DEFAULTS = Resolved(Settings(), dict.fromkeys(_FIELDS, "default"))
_METADATA = {field.name: field.metadata for field in fields(Settings)}
_WORDS = {"ratio": ("auto", "model"), "speculate": ("auto", "off")}  # words allowed in place of a number
_EXAMPLES = {
    "ratio": 0.15, "speculate": 4, "top_k": 5, "seed": 7, "threads": 4, "model": "handbook", "template_var": "enable_thinking=true",
    "allow_origin": "https://chat.example",
}  # fmt: skip
"""Values for hints, where the default is none."""
_BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
PATHS = ("store", "model", "lora", "prompt", "embeddings", "tier_key_file")
"""Settings with paths, which are relative to the file that sets them."""


def resolve(flags: Mapping[str, Any], *, lenient: bool = False) -> Resolved:
    """Merge all sources. A flag of None or [] counts as not given. Raises UsageError with the origin of a bad value;
    lenient: leaves it out."""
    values: dict[str, Any] = {}
    origin, ignored = dict(DEFAULTS.origin), dict[str, str]()
    problems = list[UsageError | NotFoundError]()
    users, *projects = config_files()
    for path in filter(Path.is_file, (users, *projects)):
        try:
            found, ignored = _accepted(path, is_users=path == users)
        except (UsageError, NotFoundError) as error:
            problems.append(error)
            continue
        problems += _merge(values, origin, found, str(path), path.parent)
    for variable, text in _variables():
        problems += _merge(values, origin, {variable.removeprefix(_ENV).lower(): _Text(text)}, variable)
    problems += _merge(values, origin, {k: v for k, v in flags.items() if v is not None and v != []}, "flag")
    if problems and not lenient:
        raise problems[0]
    if not values.get("store") and trust.project_folder() is None and os.path.lexists(trust.PROJECT_FOLDER):
        ignored["store"] = os.path.abspath(trust.PROJECT_FOLDER)
    chosen = {name for name, place in origin.items() if place == "flag" or place.startswith(_ENV)}
    unset = {name: p for name, p in ignored.items() if name not in chosen}
    return Resolved(Settings(**values), origin, unset, problems)


def _accepted(path: Path, *, is_users: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a file's settings, and those ignored because the project is not trusted, with the file."""
    content, found = read_settings(path)
    if is_users or trust.is_trusted(path, content):
        return found, {}
    risky = risky_settings(found, path.parent)
    return {k: v for k, v in found.items() if k not in risky}, dict.fromkeys(risky, str(path))


def _variables() -> list[tuple[str, str]]:
    """Return the environment's settings. An empty variable counts as unset."""
    return [(v, text) for v, text in os.environ.items() if text and v.startswith(_ENV) and v != API_KEY_VARIABLE]


def parse_setting(key: str, texts: Sequence[str]) -> tuple[str, Any]:
    """Return the field name and the converted value of `config set KEY VALUE...`. Raises UsageError."""
    name = _name(key)
    if name not in _FIELDS:
        raise UsageError(f"unknown setting {key!r}", _similar(name))
    if _FIELDS[name] is tuple:
        return name, list(texts)
    if len(texts) != 1:
        raise UsageError(f"{key} takes one value, not {len(texts)}", "put text with spaces in quotes")
    return name, _convert(name, _Text(texts[0]), "")


def config_files(folder: Path = Path()) -> list[Path]:
    """Return the user's file and, if it exists, the project's file, which takes precedence.

    The project's file is the nearest cacheblend.toml from the folder up to the repository root or home directory.
    """
    files, root = [user_config_path("cacheblend") / "config.toml"], project_root(folder)
    return [*files, root / FILE] if root is not None and (root / FILE).is_file() else files


def project_root(folder: Path = Path()) -> Path | None:
    """Return the nearest folder with a cacheblend.toml or .git, up to the home directory; None outside a project."""
    try:
        here = Path(os.path.abspath(folder))
    except FileNotFoundError:
        raise NotFoundError("the current directory no longer exists", "change to another one") from None
    for folder in (here, *here.parents):
        if (folder / FILE).is_file() or (folder / ".git").exists():
            return folder
        if folder == Path.home():
            break
    return None


def read_settings(path: Path) -> tuple[bytes, dict[str, Any]]:
    """Return a settings file's content, as read and by name. Raises UsageError, NotFoundError."""
    with reading(path):
        content = read_regular(path, _MOST_BYTES)
    if any(line.count(b".") > _MOST_DOTS for line in content.split(b"\n")):
        raise UsageError(f"{path} has a line with more than {_MOST_DOTS} dots", "fix or remove it")
    try:
        values = tomllib.loads(decode_text(content, str(path)))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}", "fix or remove it") from error
    return content, {_name(key): value for key, value in values.items()}


def risky_settings(values: Mapping[str, Any], folder: Path) -> list[str]:
    """Return those of the settings that a project in this folder may set only if it is trusted."""

    def is_harmless(name: str, value: Any) -> bool:
        if name == "prompt":  # a file, which has to be inside the project
            file = os.path.realpath(folder / Path(str(value)).expanduser())
            return Path(file).is_relative_to(os.path.realpath(folder))
        return name in HARMLESS or name not in _FIELDS  # an unknown name is an error in any case

    return [name for name, value in values.items() if not is_harmless(name, value)]


def _name(key: str) -> str:
    return key.replace("-", "_")


def of_settings(kind: type[T], settings: Settings, **others: Any) -> T:
    """Build a dataclass from the settings with the names of its fields. `others` adds or replaces fields."""
    own = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    values = {f.name: getattr(settings, f.name) for f in fields(settings) if f.name in own}
    return kind(**values | others)


class _Text(str):
    """A value from the environment or command line, to convert from text."""


def _merge(
    values: dict[str, Any], origin: dict[str, str], layer: Mapping[str, Any], place: str, folder: Path | None = None
) -> list[UsageError]:
    """Add the settings of one place. Return the errors of those that are left out."""
    problems = list[UsageError]()
    for key, value in layer.items():
        name = _name(key)
        try:
            converted = _known(name, key, value, place)
        except UsageError as error:
            problems.append(error)
            continue
        if folder is not None and name in PATHS:
            converted = _beside(folder, name, converted)
        values[name], origin[name] = converted, place
    return problems


def _known(name: str, key: str, value: Any, place: str) -> Any:
    """Return the value of a setting in its type. Raises UsageError, also for an unknown one."""
    if name in _FIELDS:
        return _convert(name, value, place)
    hint = _similar(name)
    if isinstance(value, dict):
        hint = f"settings have no sections: remove the line [{key}]"
    elif name in REMOVED:
        hint = "this setting was removed, and has no effect any more: remove the line"
    raise UsageError(f"unknown setting {key!r} in {place}", hint)


def _similar(name: str) -> str:
    return did_you_mean(name, _FIELDS, "cacheblend config show --all", most=3)


def _convert(name: str, value: Any, place: str) -> Any:
    """Return the value in the setting's type. place: origin for messages: "flag", a file, a variable, or ""."""
    kind = _FIELDS[name]
    shown = f"--{name.replace('_', '-')}" if place == "flag" else f"{name} in {place}" if place else name
    if kind is tuple:
        return _texts(name, value, shown)
    if name in _WORDS:
        if value in _WORDS[name]:
            return str(value)
        if place == "flag" and isinstance(value, str):  # a flag that also takes words arrives as text
            value = _Text(value)
    try:
        converted = _typed(kind, value)
    except (ValueError, KeyError):
        expected = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}[kind]
        expected += f", {' or '.join(_WORDS[name])}" if name in _WORDS else ""
        raise UsageError(f"{shown} is {value!r}, not {expected}", _share(value) or _example(name, place)) from None
    if isinstance(converted, str):
        _check_word(name, converted, place, shown)
    else:
        _check_bounds(name, converted, place, shown)
    return converted


def _typed(kind: type, value: Any) -> Any:
    """Return the value as a finite number, a bool or text. Raises ValueError, KeyError."""
    fits = isinstance(value, (kind, _Text)) or (kind is float and isinstance(value, int))
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise ValueError
    converted = _BOOLS[value.lower()] if kind is bool and isinstance(value, _Text) else kind(value)
    if isinstance(converted, float) and not math.isfinite(converted):
        raise ValueError
    return converted


def _check_word(name: str, value: str, place: str, shown: str) -> None:
    """Raises UsageError for text that is not UTF-8, an unknown name, or a tier with credentials."""
    if name not in PATHS:
        check_text(value, shown)
    if (choices := _METADATA[name].get("choices")) and value not in choices:
        named = f"{shown} {value!r}" if place in ("flag", "") else f"{name} {value!r} in {place}"
        if name == "kv_dtype":
            check_kv_dtype(value, named)
        raise UsageError(f"unknown {named}", f"known: {', '.join(choices)}")
    if name == "tier" and ("@" in value or "?" in value):  # do not print it: others may read the message
        raise UsageError(f"{shown} contains credentials", "name only a bucket and a prefix; credentials: environment")


def check_kv_dtype(value: str, named: str = "") -> None:
    """Raise UsageError for an unknown or removed KV dtype. named: the setting and its value, for the message."""
    named = named or f"KV dtype {value!r}"
    if value in REMOVED_KV_DTYPES:
        raise UsageError(f"{named} was removed", f"use {REMOVED_KV_DTYPES[value]}")
    if value not in KV_DTYPES:
        raise UsageError(f"unknown {named}", f"known: {', '.join(KV_DTYPES)}")


def _check_bounds(name: str, value: float, place: str, shown: str) -> None:
    least, most = _METADATA[name].get("least"), _METADATA[name].get("most", math.inf)
    if value > most:
        raise UsageError(f"{shown} is {value!r}; the maximum is {most}", _example(name, place))
    if least is not None and value < least:
        raise UsageError(f"{shown} is {value!r}; the minimum is {least}", _example(name, place))


def _example(name: str, place: str) -> str:
    """Return a hint with a valid value, in the form of the place that has the wrong one."""
    kind, default = _FIELDS[name], _EXAMPLES.get(name, getattr(Settings(), name))
    value = str(default).lower() if kind is bool else f'"{default}"' if kind is str else f"{default:g}"
    if place == "flag":
        return f"for example --{name.replace('_', '-')} {value}"
    if place.startswith(_ENV):
        return f"for example {place}={value}"
    return f"for example {name} = {value}" if place else f"for example: cacheblend config set {name} {value}"


def _share(value: Any) -> str:
    """Return a hint for a percentage given as a number; "" for other values."""
    try:
        text = str(value).strip()
        return f"write {float(text.removesuffix('%')) / 100:g}" if text.endswith("%") else ""
    except ValueError:
        return ""


def _texts(name: str, value: Any, shown: str) -> tuple[str, ...]:
    """Return the values of a list, or of comma-separated text."""
    values = value.split(",") if isinstance(value, _Text) else value
    if not isinstance(values, list | tuple) or not all(isinstance(v, str) for v in values):
        raise UsageError(f"{shown} is {value!r}, not a list of text", f'for example {name} = ["{_EXAMPLES[name]}"]')
    return tuple(v.strip() for v in values)


def _beside(folder: Path, name: str, value: str) -> str:
    """Resolve a path relative to its configuration file.

    A possible Hugging Face id stays, unless such a path exists.
    """
    path = Path(value).expanduser()
    if name in ("model", "embeddings") and not (
        value.startswith(("./", "../", "~")) or (folder / path).is_dir() or path.suffix == ".gguf"
    ):
        return value
    return str(folder / path) if value else value
