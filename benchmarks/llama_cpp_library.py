"""llama.cpp's C library, loaded by ctypes from xllamacpp's installed package without importing it, for `peers.py`.

Parameter structs change from version to version. They are taken from the library's own `*_default_params` as opaque
bytes, larger than any version's, and passed back by value: a callee reads its own part. A field is changed only if its
place is recognised by its defaults, and the library's later reports are compared with the values that were set.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections import deque
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_float, c_int, c_int8, c_int32, c_uint8, c_uint32, c_void_p
from importlib import metadata
from pathlib import Path
from typing import Any

PARAMS_BYTES = 1024  # maximum size of a struct that is passed by value; llama_context_params has about 170
N_CTX, N_BATCH, N_UBATCH, N_SEQ_MAX = range(4)  # uint32 at the beginning of llama_context_params
CONTEXT_DEFAULTS = (512, 2048, 512, 1)
CONTEXT_FLAGS = bytes((0, 1, 1, 1, 1, 0))  # embeddings, offload_kqv, no_perf, op_offload, swa_full, kv_unified
LEAST_BATCH = 32  # tokens of a batch


class Params(ctypes.Structure):
    _fields_ = (("raw", c_uint8 * PARAMS_BYTES),)


class Batch(ctypes.Structure):
    """llama_batch, with room for fields that a later version appends."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
        ("later", c_uint8 * 64),
    )


_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (c_void_p, c_void_p)),
    "llama_model_default_params": (Params, ()),
    "llama_model_load_from_file": (c_void_p, (c_char_p, Params)),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    "llama_context_default_params": (Params, ()),
    "llama_init_from_model": (c_void_p, (c_void_p, Params)),
    "llama_free": (None, (c_void_p,)),
    "llama_n_ctx": (c_uint32, (c_void_p,)),
    "llama_n_ctx_seq": (c_uint32, (c_void_p,)),
    "llama_n_seq_max": (c_uint32, (c_void_p,)),
    "llama_set_n_threads": (None, (c_void_p, c_int32, c_int32)),
    "llama_batch_init": (Batch, (c_int32, c_int32, c_int32)),
    "llama_decode": (c_int32, (c_void_p, Batch)),
    "llama_get_logits_ith": (POINTER(c_float), (c_void_p, c_int32)),
}


class LlamaError(RuntimeError):
    """llama.cpp failed or cannot be used."""


class Library:
    """The loaded library. name: package and version. Errors that llama.cpp logs are kept for messages; its other output
    is dropped."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self._errors = deque[str](maxlen=3)
        try:
            self._library = ctypes.CDLL(str(path))
            for function, (result, arguments) in _FUNCTIONS.items():
                bound = getattr(self._library, function)
                bound.restype, bound.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise LlamaError(f"{path} cannot be used: {error}") from error
        self._callback = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)(self._log)  # lives as long as the library
        self.llama_log_set(ctypes.cast(self._callback, c_void_p), None)
        self.llama_backend_init()

    def __getattr__(self, function: str) -> Callable[..., Any]:
        bound: Callable[..., Any] = getattr(self._library, function)
        return bound

    def _log(self, level: int, text: bytes, user_data: int | None) -> None:
        if level == 4:  # GGML_LOG_LEVEL_ERROR
            self._errors.append(text.decode(errors="replace").strip())

    def error(self, message: str) -> LlamaError:
        """Return the error, with llama.cpp's log since the last one."""
        logged = "; ".join(self._errors)
        self._errors.clear()
        return LlamaError(f"{message}: {logged}" if logged else message)

    def load_model(self, file: Path) -> int:
        """Load a GGUF file. Raises LlamaError."""
        self._errors.clear()
        model: int | None = self.llama_model_load_from_file(str(file).encode(), self.llama_model_default_params())
        if not model:
            raise self.error(f"llama.cpp ({self.name}) does not load {file}")
        return model

    def new_context(
        self, model: int, num_cells: int, num_sequences: int, num_threads: int, num_batch: int = LEAST_BATCH
    ) -> int:
        """Return a context with f16 KV cells shared by all sequences, and flash attention if llama.cpp has it.
        num_batch: tokens computed at once, at least one per sequence. Raises LlamaError if the layout of its parameters
        is unknown, or memory is short."""
        self._errors.clear()
        params = self.llama_context_default_params()
        head = (c_uint32 * 4).from_buffer(params)
        flags = bytes(params.raw).find(CONTEXT_FLAGS)
        if tuple(head) != CONTEXT_DEFAULTS or flags < 0:
            raise self.error(f"the parameters of {self.name} are laid out in an unknown way")
        head[N_CTX], head[N_SEQ_MAX] = num_cells, num_sequences
        head[N_BATCH] = head[N_UBATCH] = max(num_sequences, num_batch)
        params.raw[flags + len(CONTEXT_FLAGS) - 1] = 1  # kv_unified
        context: int | None = self.llama_init_from_model(model, params)
        if not context:
            raise self.error(f"llama.cpp ({self.name}) makes no context of {num_cells} tokens")
        made = (self.llama_n_ctx(context), self.llama_n_ctx_seq(context), self.llama_n_seq_max(context))
        if made[0] < num_cells or made[1] != made[0] or made[2] != num_sequences:
            self.llama_free(context)
            raise self.error(f"the parameters of {self.name} are laid out in an unknown way")
        self.llama_set_n_threads(context, num_threads, num_threads)
        return context


def library() -> Library:
    """Return the installed library. Raises LlamaError without one."""
    spec = importlib.util.find_spec("xllamacpp")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("xllamacpp*.so")):
            return Library(f"xllamacpp {metadata.version('xllamacpp')}", path)
    raise LlamaError("xllamacpp is not installed")
