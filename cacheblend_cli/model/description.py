"""Description of a model: what identifies it and its KV, read without its weights. Imports neither torch nor numpy."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from cacheblend_cli import user_cache
from cacheblend_cli.errors import check_known
from cacheblend_cli.model.cpu import cpu_features
from cacheblend_cli.model.families.quantisation import quantisation_of
from cacheblend_cli.model.families.reader import OTHER_FIELDS
from cacheblend_cli.model.model_files import ADAPTER_FILES, checkpoint_files, gguf_file_of, is_converted
from cacheblend_cli.model.safetensors_header import safetensors_offsets
from cacheblend_cli.model.spec import ModelSpec
from cacheblend_cli.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from cacheblend_cli.model.decoder import Decoder

DTYPES = ("float32", "bfloat16", "float16")
WEIGHT_DTYPES = ("auto", "int8", "int4")  # auto: as in the file; others: see `gguf_files.quantise.KINDS`
STORED_AS = {"F64": "float32", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # safetensors' names
_WORDS = ("no", "yes")


@dataclass(frozen=True)
class Precision:
    """Compute dtype and storage of the weights."""

    dtype: str = "auto"  # "auto": by checkpoint and machine
    weights: str = "auto"  # one of WEIGHT_DTYPES


class Loaded(Protocol):
    """A model with its weights: model/loading.py: LoadedModel."""

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def decoder(self) -> Decoder: ...
    @property
    def generation_config(self) -> Mapping[str, Any]: ...
    def check_files(self) -> None: ...


def _never() -> Loaded:
    raise AssertionError("this description has no way to load its model")


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """What chunk keys, prompts and the sizes of KV depend on."""

    name: str
    path: Path
    spec: ModelSpec
    dtype: str  # name of the compute dtype
    tokenizer: Tokenizer
    fingerprint: str  # covers architecture, weights, RoPE, dtypes and adapter
    fingerprints: Mapping[str, str] = field(default_factory=dict)  # fingerprints of the same model by compute dtype
    identity: str = ""  # fingerprint of the same model in any dtype, without an adapter
    lora: Path | None = None  # the adapter merged into the weights
    lora_digest: str = ""  # digest of the adapter's content
    weight_dtype: str = "auto"
    weights_digest: str = ""  # digest of the files of the weights
    load: Callable[[], Loaded] = field(default=_never, repr=False, compare=False)

    @property
    def loaded(self) -> Loaded:
        """The model with its weights, which are loaded on first use."""
        return self.load()

    def check_headers(self) -> None:
        """Raise UsageError for a file of weights that was cut off."""
        for file in () if is_converted(self.path) else checkpoint_files(self.path):
            safetensors_offsets(file)

    @property
    def shown_path(self) -> Path:
        """Path to show to the user: the GGUF file if `path` is the directory that stands for it."""
        return gguf_file_of(self.path) if is_converted(self.path) else self.path


def describe(
    spec: ModelSpec,
    path: Path,
    name: str,
    precision: Precision,
    tokenizer: Tokenizer,
    lora: Path | None = None,
    lora_digest: str = "",
    load: Callable[[], Loaded] = _never,
) -> ModelDescription:
    """Describe the model in `path`. precision: with the name of a dtype. Raises UsageError, NotFoundError."""
    dtype, weight_dtype = precision.dtype, precision.weights
    fingerprints = {name: model_fingerprint(spec, path, name, lora_digest, weight_dtype) for name in DTYPES}
    return ModelDescription(
        name=name,
        path=path,
        spec=spec,
        dtype=dtype,
        tokenizer=tokenizer,
        fingerprint=fingerprints[dtype],
        fingerprints=fingerprints,
        identity=model_fingerprint(spec, path, "float32"),
        lora=lora,
        lora_digest=lora_digest,
        weight_dtype=weight_dtype,
        weights_digest=weights_digest(path),
        load=load,
    )


def resolve_dtype(name: str, device_type: str, spec: ModelSpec, model_dir: Path) -> str:
    """Return the name of the compute dtype. `auto`: the checkpoint's own dtype; on a CPU bf16 if that is the
    checkpoint's and the CPU multiplies it natively, else fp32, which rounds nothing."""
    if name != "auto":
        check_known("dtype", name, ("auto", *DTYPES))
        return name
    stated = str(spec.config.get("dtype") or spec.config.get("torch_dtype") or weights_dtype(model_dir))
    stated = stated.removeprefix("torch.")
    stated = stated if stated in DTYPES else "float32"
    if device_type != "cpu" or (stated == "bfloat16" and _has_bfloat16()):
        return stated
    return "float32"


def _has_bfloat16() -> bool:
    """Return `compiled.has_bfloat16`, which multiplies to find out. Without torch: as remembered for this CPU, this
    compiled code and this torch; torch is imported if nothing is."""
    package = find_spec("cacheblend_kernels")
    assert package is not None
    libraries = [file for folder in package.submodule_search_locations or () for file in Path(folder).glob("_cpu*")]
    memo = user_cache.place("bfloat16", cpu_features(), version("torch"), _stamps(sorted(libraries)))
    known = user_cache.recall(memo)
    if known in _WORDS and "torch" not in sys.modules:
        return known == _WORDS[True]
    from cacheblend_kernels import compiled

    if known != (word := _WORDS[compiled.has_bfloat16()]):
        user_cache.keep(memo, word)
    return word == _WORDS[True]


def weights_dtype(model_dir: Path) -> str:
    """Return the dtype of most elements of a checkpoint; bfloat16 if no tensor has one of DTYPES."""
    counts = dict.fromkeys(STORED_AS.values(), 0)
    for file in checkpoint_files(model_dir):
        for stored, shape, *_ in safetensors_offsets(file).values():
            if stored in STORED_AS:
                counts[STORED_AS[stored]] += math.prod(shape)
    most = max(counts, key=lambda name: counts[name])
    return most if counts[most] else "bfloat16"


def model_fingerprint(
    spec: ModelSpec, path: Path, dtype: str, lora_digest: str = "", weight_dtype: str = "auto"
) -> str:
    """Return blake2b-128 over everything that K and V depend on: shape, RoPE, weights, how they are read and stored,
    compute dtype, adapter. On the generic path the spec covers only some fields of config.json, so all fields count
    that may affect a forward pass."""
    # fields added later for other families do not change the fingerprint while they have their default
    values = ((f.name, getattr(spec, f.name), f.default) for f in fields(spec) if f.name != "config")
    shape = {name: value for name, value, default in values if value != default}
    if spec.generic:
        shape["config"] = {name: value for name, value in spec.config.items() if name not in OTHER_FIELDS}
    parts = json.dumps(shape, sort_keys=True, default=str) + weights_digest(path) + f"torch.{dtype}" + lora_digest
    if quantisation := quantisation_of(path):
        parts += repr(quantisation)
    parts += "" if weight_dtype == "auto" else weight_dtype
    return hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()


def weights_digest(model_dir: Path) -> str:
    """Return xxh3-128 over all weight files, hex. Cached per (path, size, times, inode) in the user's cache."""
    files = checkpoint_files(model_dir)
    memo = user_cache.place("weights", *_stamps(files))
    if len(known := user_cache.recall(memo)) == 32:
        return known
    digest = xxhash.xxh3_128()
    for file in files:
        with open(file, "rb") as stream:
            hashlib.file_digest(stream, lambda: digest)  # type: ignore[arg-type, return-value]
    user_cache.keep(memo, digest.hexdigest())
    return digest.hexdigest()


def adapter_digest(lora: Path) -> str:
    """Return `LoraAdapter.digest`, cached as `weights_digest`. Raises as `LoraAdapter.read`."""
    files = [lora / name for name in ADAPTER_FILES]
    memo = user_cache.place("adapter", *_stamps(files)) if all(file.is_file() for file in files) else None
    if memo is not None and len(known := user_cache.recall(memo)) == 32:
        return known
    from cacheblend_cli.model.adapter import LoraAdapter

    digest = LoraAdapter.read(lora).digest
    if memo is not None:
        user_cache.keep(memo, digest)
    return digest


def _stamps(files: list[Path]) -> list[tuple[str | int, ...]]:
    """Return what changes with the files. A copy can have the time of the file that it replaces, but not its ctime."""
    stats = ((f.resolve(), f.stat()) for f in files)
    return [(str(f), s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for f, s in stats]
