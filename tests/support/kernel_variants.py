"""Every kernel and every tile a launch may pick, for compiling ahead of time on a machine without a GPU.

What a launch compiles has no end: heads, block sizes, numbers of splits and widths are constants of the code. These are
the launches of a model of 32 query and 8 KV heads over blocks of 64, in all that the tool does with a bf16 model of
heads of 128 (`tests/kernels/test_launches.py` holds them to the launches themselves); of other head sizes, dtypes,
groups and blocks each kernel's plain cases and those that take the most registers. Split contexts stand as 8 splits.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from cacheblend_kernels.triton_backend import attention_peaks, cache_ops, correction, covariance, load_kv, norms
from cacheblend_kernels.triton_backend.attention_core import join_splits_kernel
from cacheblend_kernels.triton_backend.configs import TileConfig, copies_tiles, decode_config, padded, prefill_configs
from cacheblend_kernels.triton_backend.decode_attention import decode_attention_kernel
from cacheblend_kernels.triton_backend.prefill_attention import prefill_attention_kernel
from kernel_references import BITS

SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
HEAD_DIMS = (64, 80, 96, 128, 256, 512)
NUM_KV_HEADS, GROUP, BLOCK_SIZE = 8, 4, 64
_INTS = (
    "num_seqs",
    "kv_len",
    "first_slot",
    "layer_slots",
    "first_head",
    "table_stride",
    "window",
    "words",
    "num_rows",
    "width",
)
_FLOATS = ("scale", "soft_cap", "eps", "factor")
# What a launch does not use it passes as some tensor at hand: the type is that tensor's (`KernelVariant.types`).
_POINTERS = {
    "part_ptr": "*fp32",
    "lse_ptr": "*fp32",
    "positions_ptr": "*i64",
    "cu_rows_ptr": "*i32",
    "kv_lens_ptr": "*i32",
    "table_ptr": "*i32",
    "slots_ptr": "*i64",
    "row_chunks_ptr": "*i32",
    "places_ptr": "*i64",
    "addresses_ptr": "*i64",
    "src_ptr": "*i64",
    "dst_ptr": "*i64",
    "cos_ptr": "*fp32",
    "sin_ptr": "*fp32",
    "k_scale_ptr": "*fp32",
    "v_scale_ptr": "*fp32",
    "sinks_ptr": "*fp32",
    "k_mean_ptr": "*fp32",
    "k_levels_ptr": "*fp32",
    "v_levels_ptr": "*fp32",
    "pool_k_scale_ptr": "*fp32",
    "pool_v_scale_ptr": "*fp32",
}


@dataclass(frozen=True)
class KernelVariant:
    """One kernel with its types and constants fixed. family and label say what it is; core: one a quick check takes."""

    family: str
    label: str
    kernel: Any
    dtype: str
    constants: dict[str, Any]
    num_warps: int
    num_stages: int = 3  # Triton's own choice where a launch makes none
    core: bool = False
    types: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.family} {self.label}"

    def signature(self) -> dict[str, str]:
        """Type of each argument: constants, the pointers whose type is fixed, strides, and the rest of `dtype`."""
        signature = {}
        for arg in self.kernel.arg_names:
            if arg in self.constants:
                signature[arg] = "constexpr"
            elif arg in self.types:
                signature[arg] = self.types[arg]
            elif arg in _FLOATS:
                signature[arg] = "fp32"
            elif arg in _INTS or arg.endswith("_stride"):
                signature[arg] = "i32"
            else:
                signature[arg] = _POINTERS.get(arg, f"*{self.dtype}")
        return signature

    def aligned(self) -> list[int]:
        """Indexes of the arguments known to be multiples of 16: pointers, and strides of whole rows; without those that
        a kernel takes at any address."""
        signature = self.signature()
        return [
            i
            for i, (arg, parameter) in enumerate(zip(self.kernel.arg_names, self.kernel.params, strict=True))
            if not parameter.do_not_specialize_on_alignment
            and (signature[arg].startswith("*") or (arg.endswith("_stride") and arg != "table_stride"))
        ]


def all_variants(arch: int) -> Iterator[KernelVariant]:
    """What this module's head says, on `arch` (80, 90 or 100), for the head sizes and dtypes the tool knows."""
    yield from _prefill(arch)
    yield from _decode()
    yield from _cache_writes()
    yield from _row_kernels()
    yield from _peaks()
    yield from _correction()


SINKS: dict[str, dict[str, Any]] = {  # as gpt-oss has them
    "paged group8 window sinks": {"GROUP": 8, "WINDOW": True, "SINKS": True},
    "paged group8 sinks split": {"GROUP": 8, "SINKS": True, "SPLITS": 8},
}


_OPTIONAL = {
    "WINDOW": ["window"],
    "SOFT_CAP": ["soft_cap"],
    "SINKS": ["sinks_ptr"],
    "FP8": ["k_scale_ptr", "v_scale_ptr"],
}
"""What a layer or a pool may have -> the arguments that are None without it."""


def _attention_constants(head_dim: int, config: TileConfig, options: dict[str, Any]) -> dict[str, Any]:
    defaults = {
        "GROUP": GROUP,
        "NUM_KV_HEADS": NUM_KV_HEADS,
        "HEAD_DIM": head_dim,
        "BLOCK_D": padded(head_dim),
        "BLOCK_SIZE": BLOCK_SIZE,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "SPLITS": 1,
        "CONTIGUOUS": False,
    }
    absent = [name for option, names in _OPTIONAL.items() if not options.get(option) for name in names]
    given = {name: value for name, value in options.items() if name not in _OPTIONAL}
    return {**defaults, **given, **dict.fromkeys(absent)}


def _attention(
    family: str, kernel: Any, dtype: str, head_dim: int, config: TileConfig, label: str, options: dict[str, Any], core: bool
) -> KernelVariant:  # fmt: skip
    constants = _attention_constants(head_dim, config, options)
    fp8, contiguous = bool(options.get("FP8")), constants["CONTIGUOUS"]
    types = dict.fromkeys(("k_ptr", "v_ptr"), "*u8") if fp8 else {}
    tma = not fp8 and copies_tiles(config, head_dim, SIZES[dtype], constants["BLOCK_SIZE"], contiguous)
    if "k_desc" in kernel.arg_names and not tma:
        constants |= {"k_desc": None, "v_desc": None}
    if tma:
        types |= dict.fromkeys(("k_desc", "v_desc"), f"tensordesc<{dtype}[{config.block_n}, {head_dim}]>")
    return KernelVariant(
        family,
        f"{dtype} d{head_dim} {config.block_m}x{config.block_n}{' tma' * tma} {label}",
        kernel,
        dtype,
        constants,
        config.num_warps,
        config.stages(contiguous or tma),
        core,
        types,
    )


def _prefill(arch: int) -> Iterator[KernelVariant]:
    special: dict[str, dict[str, Any]] = {
        "paged block16": {"BLOCK_SIZE": 16},
        "contiguous split": {"CONTIGUOUS": True, "SPLITS": 8},
        "paged split": {"SPLITS": 8},
        "paged group1": {"GROUP": 1},
        "paged group7": {"GROUP": 7},
        "paged window": {"WINDOW": True},
        "paged window cap": {"WINDOW": True, "SOFT_CAP": True},
        "paged fp8": {"FP8": True},
    }
    for dtype in SIZES:
        for head_dim in HEAD_DIMS:
            cases: dict[str, dict[str, Any]] = {"paged": {}}
            if dtype == "bf16":
                cases = {"contiguous": {"CONTIGUOUS": True}, "paged": {}}
                cases |= special if head_dim in (64, 128, 256, 512) else {"paged split": {"SPLITS": 8}}
                cases |= _pool_cases() if head_dim == 128 else {}
                cases |= SINKS if head_dim == 64 else {}
            for label, options in cases.items():
                for config in prefill_configs(arch, head_dim, SIZES[dtype], bool(options.get("FP8"))):
                    core = dtype == "bf16" and head_dim == 128 and label == "paged"
                    yield _attention(
                        "prefill_attention", prefill_attention_kernel, dtype, head_dim, config, label, options, core
                    )


def _pool_cases() -> dict[str, dict[str, Any]]:
    """Where the keys lie, how they are held, whether a window hides some, whether they are split: all of it."""
    cases: dict[str, dict[str, Any]] = {}
    for contiguous, window, fp8, split in product((True, False), (False, True), (False, True), (False, True)):
        label = f"{'contiguous' if contiguous else 'paged'}{' window' * window}{' fp8' * fp8}{' split' * split}"
        options = {"CONTIGUOUS": contiguous, "WINDOW": window, "FP8": fp8, "SPLITS": 8 if split else 1}
        cases[label] = options
    return cases


def _decode() -> Iterator[KernelVariant]:
    cases: dict[str, dict[str, Any]] = {
        "contiguous": {"CONTIGUOUS": True},
        "paged": {},
        "paged split": {"SPLITS": 8},
        "contiguous split": {"CONTIGUOUS": True, "SPLITS": 8},
        "paged window cap split": {"WINDOW": True, "SOFT_CAP": True, "SPLITS": 8},
        "paged fp8 split": {"FP8": True, "SPLITS": 8},
    }
    for dtype in SIZES:
        for head_dim in HEAD_DIMS:
            these = cases if dtype == "bf16" else {"paged split": {"SPLITS": 8}}
            if dtype == "bf16" and head_dim == 128:
                these = these | _pool_cases()
            if dtype == "bf16" and head_dim == 64:
                these = these | SINKS
            for label, options in these.items():
                core = dtype == "bf16" and head_dim == 128 and label == "paged split"
                config = decode_config(head_dim, GROUP, SIZES[dtype])
                yield _attention(
                    "decode_attention", decode_attention_kernel, dtype, head_dim, config, label, options, core
                )
    for head_dim in HEAD_DIMS:
        for splits in (2, 8, 64):
            yield KernelVariant(
                "join_splits",
                f"bf16 d{head_dim} splits{splits}",
                join_splits_kernel,
                "bf16",
                {"HEAD_DIM": head_dim, "BLOCK_D": padded(head_dim), "SPLITS": splits},
                4,
                core=head_dim == 128 and splits == 8,
            )


def _cache_writes() -> Iterator[KernelVariant]:
    for dtype in SIZES:
        for head_dim in HEAD_DIMS:
            heads = {"NUM_HEADS": NUM_KV_HEADS * GROUP, "NUM_KV_HEADS": NUM_KV_HEADS, "KV_PROGRAMS": 1}
            plain = dict.fromkeys(("k_scale_ptr", "v_scale_ptr"))
            rotation = {"NUM_KV_HEADS": 1, "KV_PROGRAMS": 0, "slots_ptr": None, **plain}
            bytes_pool = {"k_cache_ptr": "*u8", "v_cache_ptr": "*u8"}
            cases: tuple[tuple[str, dict[str, Any], dict[str, str]], ...] = (
                ("", plain, {}),
                ("rotation of q", rotation, {}),
                ("rotation of k", {**rotation, "NUM_HEADS": NUM_KV_HEADS}, {}),
                ("without q", {"NUM_HEADS": 0, **plain}, {}),
                ("fp8 pool", {}, bytes_pool),
                ("fp8 pool without q", {"NUM_HEADS": 0}, bytes_pool),
            )
            for label, options, types in cases:
                yield KernelVariant(
                    "rope_and_cache",
                    f"{dtype} d{head_dim} {label}".strip(),
                    cache_ops.rope_and_cache_kernel,
                    dtype,
                    {
                        **heads,
                        "HEAD_DIM": head_dim,
                        "BLOCK_HALF": padded(head_dim // 2),
                        "BLOCK_HEADS": cache_ops.HEADS_PER_PROGRAM,
                        **options,
                    },
                    4,
                    core=dtype == "bf16" and head_dim == 128,
                    types=types,
                )
    sources = {
        "fp16": "plain",
        "bf16": "plain",
        "fp32": "plain",
        "fp8": "fp8",
        "int7": "codes",
        "int4": "codes",
    }
    for source, codec in sources.items():
        for head_dim in HEAD_DIMS:
            for of_layers, run, fp8 in product((True, False), (True, False), (False, True)):
                if not of_layers and head_dim != 128:
                    continue
                stored = f"*{source}" if codec == "plain" else "*u8"
                types = {"k_ptr": stored, "v_ptr": stored}
                absent = ["slots_ptr"] * run + ["pool_k_scale_ptr", "pool_v_scale_ptr"] * (not fp8)
                absent += ["k_scale_ptr", "v_scale_ptr"] * (codec == "plain")
                absent += ["row_chunks_ptr", "places_ptr"] * (not of_layers)
                absent += ["k_mean_ptr", "k_levels_ptr", "v_levels_ptr"] * (codec != "codes")
                if fp8:
                    types |= {"k_cache_ptr": "*u8", "v_cache_ptr": "*u8"}
                if codec == "codes":
                    types |= dict.fromkeys(("k_scale_ptr", "v_scale_ptr", "k_mean_ptr"), "*bf16")
                block = load_kv.mixed_block(head_dim) if codec == "codes" else 1
                yield KernelVariant(
                    "load_kv",
                    f"{source} d{head_dim} {'layers' if of_layers else 'chunk'} {'run' if run else 'slots'}{' fp8 pool' * fp8}",
                    load_kv.load_kv_kernel,
                    "bf16",
                    {
                        "NUM_KV_HEADS": NUM_KV_HEADS,
                        "STORED_HEADS": NUM_KV_HEADS,
                        "HEAD_DIM": head_dim,
                        "BLOCK_HALF": padded(head_dim // 2),
                        "BLOCK_HEADS": load_kv.BLOCK_HEADS,
                        "CODEC": codec,
                        "K_BITS": BITS[source][0] if codec == "codes" else 0,
                        "V_BITS": BITS[source][1] if codec == "codes" else 0,
                        "BLOCK": block,
                        "STAGES": block.bit_length() - 1,
                        **dict.fromkeys(absent),
                    },
                    4,
                    core=of_layers
                    and head_dim == 128
                    and run
                    and not fp8
                    and source in ("bf16", "fp8", "int7", "int4"),
                    types=types,
                )


def _peaks() -> Iterator[KernelVariant]:
    kernels = {"row_lse": attention_peaks.row_lse_kernel, "key_peaks": attention_peaks.key_peaks_kernel}
    for (family, kernel), dtype, head_dim in product(kernels.items(), SIZES, HEAD_DIMS):
        if dtype != "bf16" and head_dim != 128:
            continue
        block_m, block_n, num_warps = attention_peaks.tile_of(padded(head_dim), SIZES[dtype])
        config = TileConfig(block_m, block_n, num_warps, 3)
        cases = [{}, {"CONTIGUOUS": True}]
        if dtype == "bf16" and head_dim == 128:
            cases += [
                {"CONTIGUOUS": contiguous, "WINDOW": window, "FP8": fp8}
                for contiguous, window, fp8 in product((False, True), (False, True), (False, True))
                if window or fp8
            ]
        for options in cases:
            of_case = {"SPLITS": attention_peaks.SPLITS, **options}
            constants = _attention_constants(head_dim, config, of_case)
            constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
            yield KernelVariant(
                family,
                f"{dtype} d{head_dim} {' '.join(name.lower() for name, on in options.items() if on)}".strip(),
                kernel,
                dtype,
                constants,
                num_warps,
                core=dtype == "bf16" and head_dim == 128 and not options,
                types={"peaks_ptr": "*i32"} | ({"k_ptr": "*u8"} if options.get("FP8") else {}),
            )


def _correction() -> Iterator[KernelVariant]:
    floats = ("of_chunk", "of_near", "near_length", "far_length", "noise", "least_noise", "less_common")
    types = dict.fromkeys(floats, "fp32") | {"longest": "i32", "stride": "i32", "num_chunks": "i32"}
    types |= dict.fromkeys(("starts_ptr", "known_ptr", "known_starts_ptr"), "*i32") | {"fresh_ptr": "*i64"}
    sums = ("mean", "spread", "norms", "sizes", "change", "common", "covariance", "inverse", "weights")
    types |= {f"{name}_ptr": "*fp32" for name in sums}
    for dtype, head_dim, fp8 in product(SIZES, HEAD_DIMS, (False, True)):
        if (fp8 and dtype != "bf16") or (head_dim != 128 and (fp8 or dtype != "bf16")):
            continue
        tiles = correction.tiles_of(head_dim, SIZES[dtype])
        pool = {"k_ptr": "*u8", "v_ptr": "*u8"} if fp8 else {}
        plain = {} if fp8 else dict.fromkeys(("k_scale_ptr", "v_scale_ptr"))
        of_head = {"NUM_KV_HEADS": NUM_KV_HEADS, "HEAD_DIM": head_dim, "BLOCK_HALF": max(16, padded(head_dim // 2))}
        width, heads = NUM_KV_HEADS * head_dim, {"BLOCK_HEADS": padded(NUM_KV_HEADS)}
        out, block = {"out_ptr": "*fp32"}, correction.BLOCK
        kernels: list[tuple[str, Any, dict[str, Any], dict[str, str], int]] = [
            ("chunk_spread", covariance.chunk_spread_kernel, {**of_head, **plain, "BLOCK_ROWS": tiles.spread}, pool, 8),
            (
                "standardise",
                covariance.standardise_kernel,
                {**of_head, **plain, **heads},
                pool,
                4,
            ),
            ("change", covariance.change_kernel, {**of_head, **plain, **heads}, pool, 4),
            *(
                (
                    f"move_stale{' damped' * damped}",
                    correction.move_stale_kernel,
                    {**of_head, **plain, "BLOCK_M": tiles.known, "BLOCK_N": tiles.moved, "DAMPED": damped},
                    pool,
                    4,
                )
                for damped in (False, True)
            ),
        ]
        if not fp8:
            kernels += [
                (
                    "common",
                    covariance.common_kernel,
                    {"K_WIDTH": width, "BLOCK_M": correction.COMMON_ROWS, "BLOCK_W": correction.COMMON_CHANNELS},
                    out,
                    4,
                ),
                (
                    "covariance",
                    covariance.covariance_kernel,
                    {"WIDTH": 2 * width, "BLOCK_M": block, "BLOCK_N": block, "BLOCK_K": tiles.channels},
                    out,
                    4,
                ),
                (
                    "inverse",
                    correction.inverse_kernel,
                    {"BLOCK_M": block, "BLOCK_P": correction.PIVOT_ROWS, "COPIES": correction.PIVOT_WARPS},
                    out,
                    correction.PIVOT_WARPS,
                ),
                (
                    "weights",
                    correction.weights_kernel,
                    {"K_WIDTH": width, "BLOCK_M": block, "BLOCK_W": block},
                    out,
                    4,
                ),
            ]
        for family, kernel, constants, own, num_warps in kernels:
            yield KernelVariant(
                family,
                f"{dtype} d{head_dim}{' fp8 pool' * fp8}",
                kernel,
                dtype,
                constants,
                num_warps,
                core=dtype == "bf16" and head_dim == 128 and not fp8 and "damped" not in family,
                types=types | own,
            )


def _row_kernels() -> Iterator[KernelVariant]:
    for dtype in SIZES:
        for width in (1024, 640):
            for (use_k, use_v), fp8 in product(((True, True), (False, True), (True, False)), (False, True)):
                yield KernelVariant(
                    "kv_deviation",
                    f"{dtype} w{width} {'k' * use_k}{'v' * use_v}{' fp8 pool' * fp8}",
                    cache_ops.kv_deviation_kernel,
                    dtype,
                    {
                        "HEAD_DIM": 128,
                        "WIDTH": width,
                        "BLOCK": min(1024, padded(width)),
                        "USE_K": use_k,
                        "USE_V": use_v,
                        **({} if fp8 else dict.fromkeys(("k_scale_ptr", "v_scale_ptr"))),
                    },
                    4,
                    core=dtype == "bf16" and width == 1024 and use_k and use_v and not fp8,
                    types={"out_ptr": "*fp32"} | ({"k_cache_ptr": "*u8", "v_cache_ptr": "*u8"} if fp8 else {}),
                )
        for width in (128, 2048, 4096, 8192):
            for add in (False, True):
                block, rows, warps = norms.norm_tile(width)
                heads = 32 if width == 128 else 1
                yield KernelVariant(
                    "rms_norm",
                    f"{dtype} w{width}{' add' if add else ''}",
                    norms.rms_norm_kernel,
                    dtype,
                    {"HEADS": heads, "WIDTH": width, "BLOCK": block, "ROWS": rows, "ADD": add},
                    warps,
                    core=dtype == "bf16" and width == 4096 and add,
                )
        for activation in norms.ACTIVATIONS:
            yield KernelVariant(
                "act_and_mul",
                f"{dtype} {activation}",
                norms.act_and_mul_kernel,
                dtype,
                {"ACTIVATION": activation, "BLOCK": norms.ACTIVATION_BLOCK},
                4,
                core=dtype == "bf16",
            )
