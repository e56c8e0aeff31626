"""What a run is told: engine, blending. Frozen, named, checked where they are made."""

from __future__ import annotations

from dataclasses import dataclass

from cacheblend_cli.blend.corrections import CORRECTIONS
from cacheblend_cli.blend.policy import BlendPolicy
from cacheblend_cli.blend.selectors import make_selector
from cacheblend_cli.errors import UsageError
from cacheblend_cli.prompt.collection import check_kv_dtype
from cacheblend_cli.prompt.wording import check_prompt, parse_variables
from cacheblend_cli.settings import Settings, of_settings

MODES = ("blend", "full", "reuse")
DEVIATIONS = ("v", "k", "kv")
POOL_DTYPES = ("auto", "float8_e4m3")
DECODERS = ("auto", "torch", "llama.cpp")


@dataclass(frozen=True)
class EngineConfig:
    """model: a directory, a GGUF file, a hub id, smollm2 or handbook; None for smollm2 where it is installed, else handbook.
    lora: the directory of a LoRA adapter to merge into it. dtype, weight_dtype: see `Precision`. threads: CPU threads, None for torch's own choice.

    gpu_memory_utilization: share of a GPU's memory to use, weights included. eager: decode without CUDA graphs.
    kv_pool_dtype: what K and V are kept in while a question is answered, "auto" for the compute dtype. prompt: the user's
    message with {chunks} and {question}, "" for the model's own or the default; system: the system prompt, "" for none;
    template_var: NAME=VALUE for the chat template. decode_with: torch, llama.cpp, or auto for the faster of the two where both can;
    decode_model: the GGUF file that llama.cpp decodes with, "" for the model's own."""

    model: str | None = None
    lora: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    weight_dtype: str = "auto"
    attention_backend: str = "auto"
    block_size: int = 64
    threads: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_dtype: str = "auto"
    eager: bool = False
    kv_pool_dtype: str = "auto"
    prompt: str = ""
    system: str = ""
    template_var: tuple[str, ...] = ()
    decode_with: str = "auto"
    decode_model: str = ""

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise UsageError(f"block size {self.block_size} is no power of two", "64 fits every backend")
        check_kv_dtype(self.kv_dtype)
        if self.kv_pool_dtype not in POOL_DTYPES:
            raise UsageError(f"unknown KV pool dtype {self.kv_pool_dtype!r}", f"known: {', '.join(POOL_DTYPES)}")
        if self.decode_with not in DECODERS:
            raise UsageError(f"unknown --decode-with {self.decode_with!r}", f"known: {', '.join(DECODERS)}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise UsageError(
                f"--gpu-memory-utilization {self.gpu_memory_utilization:g} is not above 0 and at most 1",
                "0.9 leaves a tenth of the GPU's memory to others",
            )
        parse_variables(self.template_var)
        if self.prompt:
            check_prompt(self.prompt)


@dataclass(frozen=True)
class BlendConfig:
    """mode: blend, full or reuse. ratio: share of the reusable, inexact tokens to recompute; a tuple of (layer, ratio)
    pairs in `checks` replaces ratio and check_layer (gradual filtering). nucleus > 0: fewer, when that share of the
    scores' sum is covered. probe_layers: the first and the last layer whose attention `query` and `draft` follow, None
    for the middle half. draft_tokens: how much of the answer `draft` drafts. correction: what is done to the tokens that are
    not recomputed, see `corrections.CORRECTIONS`; or none. max_risk: of an answer that is another than a full prefill's, see
    engine/gate.py; None for any."""

    mode: str = "blend"
    ratio: float = 0.15
    selector: str = "query"
    deviation: str = "k"
    check_layer: int = 1
    block: int = 1
    seed: int = 0
    checks: tuple[tuple[int, float], ...] = ()
    nucleus: float = 0.0
    probe_layers: tuple[int, int] | None = None
    draft_tokens: int = 8
    correction: str = "regression"
    max_risk: float | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError(f"unknown mode {self.mode!r}", f"known: {', '.join(MODES)}")
        if self.deviation not in DEVIATIONS:
            raise UsageError(f"unknown deviation {self.deviation!r}", f"known: {', '.join(DEVIATIONS)}")
        for _, ratio in self.checks or ((self.check_layer, self.ratio),):
            if not 0 <= ratio <= 1:
                raise UsageError(f"--ratio {ratio} is not between 0 and 1", "0.15 recomputes 15 % of the tokens")
        if not 0 <= self.nucleus <= 1:
            raise UsageError(f"--nucleus {self.nucleus} is not between 0 and 1", "0 is off")
        if self.max_risk is not None and not 0 <= self.max_risk <= 1:
            raise UsageError(
                f"--max-risk {self.max_risk:g} is not between 0 and 1", "0.1: one answer in ten may differ"
            )
        for name, count in (("block", self.block), ("draft-tokens", self.draft_tokens)):
            if not 1 <= count < 2**63:
                raise UsageError(f"--{name} {count} is not 1 or more, or too large", "see: cacheblend ask --help")
        if self.correction != "none" and self.correction not in CORRECTIONS:
            raise UsageError(f"unknown correction {self.correction!r}", f"known: {', '.join(CORRECTIONS)}, none")
        layers, ratios = [c[0] for c in self.checks], [c[1] for c in self.checks]
        if layers != sorted(set(layers)) or ratios != sorted(ratios, reverse=True):
            raise UsageError("check layers must rise and their ratios fall", "for example 1:0.3,4:0.15")

    @classmethod
    def of(cls, settings: Settings) -> BlendConfig:
        """How the settings blend; with --ratio auto, at the floor. Raises UsageError."""
        make_selector(settings.selector)
        if settings.max_risk is not None and isinstance(settings.ratio, str):
            raise UsageError("--max-risk is fitted for one ratio, and --ratio is auto", "give a number to --ratio")
        return of_settings(
            cls,
            settings,
            ratio=settings.ratio_floor if isinstance(settings.ratio, str) else settings.ratio,
            seed=settings.seed or 0,
            checks=parse_checks(settings.gradual),
            probe_layers=parse_layers(settings.probe_layers),
        )

    @property
    def drafts(self) -> bool:
        """Whether the selector drafts some of the answer behind the prompt."""
        return any(part.partition(":")[0] == "draft" for part in self.selector.split("+"))

    def effective_ratio(self) -> float:
        """The ratio of the last check: what is recomputed in most layers."""
        if self.mode == "full" or self.selector == "all":
            return 1.0
        if self.mode == "reuse" or self.selector == "none":
            return 0.0
        return self.checks[-1][1] if self.checks else self.ratio

    def policy(self, num_layers: int, layer0_exact: bool, row_tile: int = 1) -> BlendPolicy:
        """The policy for a model of num_layers. Raises UsageError when a check layer is not in the model.

        row_tile: see `row_tile_of`."""
        checks, selector = self.checks or ((self.check_layer, self.ratio),), make_selector(self.selector, self.seed)
        nucleus = 0.0 if self.selector == "all" else self.nucleus
        wrong = [layer for layer, _ in checks if not 1 <= layer < num_layers]
        if self.effective_ratio() == 0.0 or (self.effective_ratio() == 1.0 and nucleus == 0):
            checks = ((1, self.effective_ratio()),)
        elif self.checks and not selector.needs_check_layer:
            raise UsageError(
                f"the selector {self.selector} chooses before layer 0, and --gradual names check layers",
                "hkvd and perturb choose at check layers",
            )
        elif selector.needs_check_layer and wrong:
            raise UsageError(
                f"check layer {wrong[0]} is not among layers 1 to {num_layers - 1}",
                "layer 0 has no deviation: its K and V depend on the token alone",
            )
        return BlendPolicy(
            selector=selector,
            checks=checks,
            deviation=self.deviation,
            block=self.block,
            nucleus=nucleus,
            probe_layers=self._probed(num_layers),
            draft_tokens=self.draft_tokens,
            correction=CORRECTIONS.get(self.correction),
            layer0_exact=layer0_exact,
            row_tile=row_tile,
        )

    def _probed(self, num_layers: int) -> tuple[int, ...]:
        """Middle layers look things up; the first ones look at neighbours, the last ones at what comes next."""
        first, last = self.probe_layers or (round(num_layers / 3), max(0, round(num_layers * 5 / 6) - 1))
        if not 0 <= first <= last < num_layers:
            raise UsageError(
                f"--probe-layers {first}-{last} are not among layers 0 to {num_layers - 1}", "for example 2-4"
            )
        return tuple(range(first, last + 1))


def parse_checks(text: str) -> tuple[tuple[int, float], ...]:
    """ "1:0.3,4:0.15" as (layer, ratio) pairs; "" is none. Raises UsageError."""
    try:
        pairs = [part.split(":") for part in text.split(",") if text]
        return tuple((int(layer), float(ratio)) for layer, ratio in pairs)
    except ValueError:
        raise UsageError(f"--gradual {text!r} is not LAYER:RATIO,...", "for example 1:0.3,4:0.15") from None


def parse_layers(text: str) -> tuple[int, int] | None:
    """ "2-4" as a first and a last layer, "3" as one; "" is None. Raises UsageError."""
    try:
        first, _, last = text.partition("-")
        return (int(first), int(last or first)) if text else None
    except ValueError:
        raise UsageError(f"--probe-layers {text!r} is not FIRST-LAST", "for example 2-4") from None
