"""The settings: defaults, help texts and topics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from platformdirs import user_data_path

from cacheblend_cli import trust
from cacheblend_cli.errors import UsageError

API_KEY_VARIABLE = "CACHEBLEND_API_KEY"
"""Environment variable with the API keys of `serve`. Not a setting, because `config show` would print the secret."""
KV_DTYPES = ("auto", "exact", "float8_e4m3", "int7", "int4")
"""Storage formats of KV: auto (int7), exact (as computed), or a codec."""
REMOVED_KV_DTYPES = {
    **dict.fromkeys(("float32", "bfloat16", "float16"), "exact"),
    **{"int8": "int7", "int6": "int7", "int3": "int4", "float8_e5m2": "float8_e4m3"},
}
"""Storage formats of earlier versions -> the one to use."""
T = TypeVar("T")


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
        "",
        "Model directory, GGUF file, Hugging Face id (ID or ID:QUANT), smollm2 or handbook.",
        shown="smollm2, if installed",
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
        "Share of the reused, inexact tokens to recompute; model: the share measured for this model (see models check), or 0.15; "
        "auto: as many as fit into the loading time, or a full prefill if that is faster.",
    )
    selector: str = _setting("query", "query, hkvd, first, random, all, none, or first:4+query.")
    check_layer: int = _setting(1, "Layer at which hkvd chooses tokens.")
    correction: str = _setting(
        "regression", "Correct the KV of other tokens by regression, or none.", choices=("regression", "none")
    )
    kl_mean: float = _setting(
        0.03,
        "models check: accept a ratio up to this mean KL to a full prefill, in nats per token; the 90th percentile may be 8/3 of it.",
        least=0,
    )
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
    retrieve: bool = _setting(True, "Search the store when a chat names no documents, chunks or search (serve).")
    allow_origin: tuple[str, ...] = _setting(
        (), "Origin of a browser client on another site, such as https://chat.example; *: all (repeatable)."
    )
    repetition_penalty: float = _setting(1.0, "Divide the logits of tokens already in the text by this; 1: off.")
    stop_repetition: bool = _setting(
        True, "End an answer that repeats the same text three times, over 32 tokens or more."
    )
    model_sampling: bool = _setting(
        False, "Use the sampling settings of the model's generation_config.json, unless set here."
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
    eager: bool = _setting(False, "Decode without CUDA graphs.")
    swap_space: float = _setting(
        4.0, "Host memory for the KV of preempted answers, in GiB; KV that does not fit is computed again."
    )
    host_cache: float | None = _setting(
        None,
        "Host memory that keeps the KV of the chunks last sent to a GPU, in GiB; 0: none.",
        shown="a quarter of the free memory",
    )
    kv_pool_dtype: str = _setting(
        "auto",
        "Format of KV on the device: auto (as computed) or float8_e4m3.",
        shown=False,
        choices=("auto", "float8_e4m3"),
    )
    keep_alive: str = _setting(
        "",
        "Time for which an answer leaves an engine running for the next questions, such as 10m; 0: off. Off by default under CI and "
        "sudo, and for a container's entry point.",
        shown="5m on a terminal, else 0",
    )

    @property
    def store_path(self) -> Path:
        """Path of the store: --store, else ./.cacheblend/store if this user made ./.cacheblend, else in user data."""
        if self.store:
            return Path(self.store).expanduser()
        return (trust.project_folder() or user_data_path("cacheblend")) / trust.STORE


GROUPS: dict[str, tuple[str, ...]] = {
    "search": ("top_k", "search", "embeddings", "on_weak_match", "on_unsupported", "expand", "context", "collection"),
    "blend": ("mode", "ratio", "selector"),
    "research": ("check_layer", "correction"),
    "check": ("kl_mean",),
    "sampling": (
        "max_tokens", "reasoning_tokens", "temperature", "top_p", "repetition_penalty", "stop_repetition", "model_sampling", "seed",
    ),
    "prompt": ("prompt", "system", "template_var"),
    "model": ("model", "lora"),
    "machine": ("device", "dtype", "weight_dtype", "attention_backend", "threads", "tensor_parallel"),
    "decoding": ("speculate",),
    "memory": ("kv_dtype", "kv_pool_dtype", "gpu_memory_utilization", "swap_space", "host_cache", "eager"),
    "tenant": ("salt",),
    "reading": ("ocr_languages",),
    "cutting": ("chunk_tokens", "window", "overlap", "neighbours", "state_every"),
    "store": ("store", "lock_timeout", "force_store", "max_size"),
    "tier": ("tier", "tier_key_file", "tier_deadline"),
    "start": ("keep_alive",),
    "serve": ("retrieve", "allow_origin"),
}  # fmt: skip
"""Settings by topic. Commands select their flags by group."""


def grouped(*groups: str, but: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names of the settings in these groups, in order."""
    return tuple(name for group in groups for name in GROUPS[group] if name not in but)


REMOVED = {
    "block_size": "KV pages have one size",
    "weights_cache_gb": "packed weights are not cached any more",
    "max_risk": "--verify compares an answer with a full prefill's, --confirm replaces it",
    "decode_with": "GGUF files are decoded here, as fast as by llama.cpp",
    "decode_model": "GGUF files are decoded here, as fast as by llama.cpp",
    "ratio_floor": "--ratio auto recomputes at least 0.15",
    "gradual": "--check-layer names one layer; several: BlendParams(checks=...) of a Python program",
    "deviation": "hkvd compares K; V or both: BlendParams(deviation=...) of a Python program",
    "block": "single tokens are chosen; runs of N: BlendParams(block=N) of a Python program",
    "probe_layers": "query observes the middle half of the layers; others: BlendParams(probe_layers=...) of a Python program",
    "kl_p90": "kl_mean sets both limits: the 90th percentile's is 8/3 of it",
    "min_score": "top_k says how many hits to take, on_weak_match = refuse refuses questions without a good one",
    "order": "found documents are ordered for the least repair",
    "sample_top_k": "use top_p, model_sampling, or top_k in a request to serve",
    "min_p": "use top_p, model_sampling, or min_p in a request to serve",
    "presence_penalty": "use repetition_penalty, or presence_penalty in a request to serve",
    "frequency_penalty": "use repetition_penalty, or frequency_penalty in a request to serve",
}
"""Settings of earlier versions -> what to do instead."""


def check_kv_dtype(value: str, named: str = "") -> None:
    """Raise UsageError for an unknown or removed KV dtype. named: the setting and its value, for the message."""
    named = named or f"KV dtype {value!r}"
    if value in REMOVED_KV_DTYPES:
        raise UsageError(f"{named} was removed", f"use {REMOVED_KV_DTYPES[value]}")
    if value not in KV_DTYPES:
        raise UsageError(f"unknown {named}", f"known: {', '.join(KV_DTYPES)}")


def of_settings(kind: type[T], settings: Settings, **others: Any) -> T:
    """Build a dataclass from the settings with the names of its fields. `others` adds or replaces fields."""
    own = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    values = {f.name: getattr(settings, f.name) for f in fields(settings) if f.name in own}
    return kind(**values | others)
