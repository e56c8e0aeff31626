"""`--ratio model`: the smallest ratio at which blending was measured to be close to a full prefill
(evaluation/profile.py).

Each model has a small file in the user's cache directory, with a profile per dtype, codec, prompt and way to blend.
Without a profile, the ratio of MEASURED_RATIOS is used if the model is in that table, else the default.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from cacheblend_cli import user_cache
from cacheblend_cli.model.description import ModelDescription
from cacheblend_cli.model.measured_ratios import MEASURED_RATIOS, MeasuredRatio
from cacheblend_cli.prompt.collection import Collection, dtype_name
from cacheblend_cli.prompt.plan import ChunkInput
from cacheblend_cli.types import NEVER_CHECKED, NO_RATIO, AskRequest, BlendParams

FORMAT = 2  # increase when the measurement or the blending changes
OTHER = "default: models check measured"
BELOW_DEFAULT = 0.5  # share of the limits for ratios below the default
ERRORS = 2  # standard errors that are added to the mean
_CHOSEN = ("mode", "ratio", "checks", "seed")  # fields of BlendParams that do not belong to a way to blend
_CLOSE_CODECS = ("float32", "bfloat16", "float16", "int7")  # MEASURED_RATIOS hold for these: int7 adds at most .0005


@dataclass(frozen=True)
class Distance:
    """KL(full prefill || blended) at a ratio with a correction, nats a token: mean over prompts, its standard error,
    and 90th percentile."""

    ratio: float
    correction: str
    mean: float
    error: float
    p90: float

    def within(self, kl_mean: float, kl_p90: float) -> bool:
        share = 1.0 if self.ratio >= BlendParams.ratio else BELOW_DEFAULT
        return self.mean + ERRORS * self.error <= share * kl_mean and self.p90 <= share * kl_p90


@dataclass(frozen=True)
class Profile:
    """conditions: conditions of the measurement, by name. prompts: number of prompts. kl_mean, kl_p90: limits of the
    mean and of the 90th percentile. measured: results by rising ratio, up to the chosen one."""

    conditions: dict[str, str]
    prompts: int
    kl_mean: float
    kl_p90: float
    measured: tuple[Distance, ...]

    @property
    def choice(self) -> Distance | None:
        """The smallest ratio within both limits, with its better correction; None if no ratio is: do not blend.

        Users' questions differ from the measured ones: standard errors are added to the mean, and ratios below the
        default must be within BELOW_DEFAULT of the limits (study/own_ratio.md)."""
        within = [d for d in self.measured if d.within(self.kl_mean, self.kl_p90)]
        return min(within, key=lambda d: (d.ratio, d.mean), default=None)

    def applied(self, blend: BlendParams) -> BlendParams:
        """Return the blending with the chosen ratio and correction. If no ratio was chosen, only exact KV is used."""
        found = self.choice
        if found is None:
            return replace(blend, selector="all")
        return replace(blend, ratio=found.ratio, correction=found.correction)

    def __str__(self) -> str:
        """Describe how close the chosen ratio is."""
        found = self.choice
        if found is None:
            found = min(self.measured, key=lambda d: d.mean)
            return f"no ratio is close enough: at {found.ratio:g} the mean KL is {found.mean:.2g} over {self.prompts} prompts"
        how = "no correction" if found.correction == "none" else found.correction
        return f"{how}, mean KL {found.mean:.2g}, 90th percentile {found.p90:.2g} over {self.prompts} prompts"


_decode = msgspec.json.Decoder(list[Profile]).decode


def conditions(collection: Collection, codec: str, blend: BlendParams) -> dict[str, str]:
    """Return the conditions of a profile, by name. codec: the chunks' codec."""
    decoder, wording = collection.decoder, collection.template.wording.to_dict()
    prompt = hashlib.blake2b(json.dumps(wording, sort_keys=True).encode(), digest_size=8).hexdigest()
    pool = "as computed" if decoder.kv_scales is None else "float8_e4m3"
    return {"dtype": dtype_name(decoder.dtype), "KV dtype": codec, "KV pool": pool, "prompt": prompt, **_way(blend)}


def _way(blend: BlendParams) -> dict[str, str]:
    """Return the fields of BlendParams that a profile depends on, as text."""
    return {name: str(value) for name, value in asdict(blend).items() if name not in _CHOSEN}


def stored_codec(chunks: Sequence[ChunkInput], collection: Collection) -> str:
    """Return the codec of the chunks' stored KV: all codecs if they differ, the collection's if none is stored."""
    found = {f"{c.codec} {c.computed_in}".strip() for c in chunks if c.cached and c.codec}
    return " and ".join(sorted(found)) or collection.codec


def keep_profile(model: ModelDescription, profile: Profile) -> None:
    """Store the profile, replacing an earlier one with the same conditions."""
    path = profile_file(model.fingerprints["float32"])
    others = [p for p in read_profiles(path) if p.conditions != profile.conditions]
    user_cache.keep(path, json.dumps([asdict(p) for p in (*others, profile)]))


def profile_file(fingerprint: str) -> Path:
    """File of a model. fingerprint: fingerprint of the model in float32, independent of its compute dtype."""
    return user_cache.place("profiles", FORMAT, fingerprint)


def read_profiles(path: Path) -> list[Profile]:
    """Return a model's profiles, the latest last; [] if the file is missing or invalid."""
    try:
        return _decode(user_cache.recall(path))
    except msgspec.MsgspecError:
        return []


def profile_for(model: ModelDescription, wanted: dict[str, str]) -> tuple[Profile | None, str]:
    """Return the model's profile for these conditions, or None and the reason."""
    known = read_profiles(profile_file(model.fingerprints["float32"]))
    for profile in known:
        if profile.conditions == wanted:
            return profile, ""
    if not known:
        return None, NEVER_CHECKED
    nearest = min((_differing(p.conditions, wanted) for p in known), key=len)
    return None, f"models check measured this model with {' and '.join(nearest)}"


def _differing(measured: dict[str, str], wanted: dict[str, str]) -> list[str]:
    return [
        "another prompt" if name == "prompt" else f"{name} {measured.get(name)}, not {value}"
        for name, value in wanted.items()
        if measured.get(name) != value
    ]


def own_blend(collection: Collection, blend: BlendParams, codec: str) -> tuple[BlendParams, str]:
    """Return the blending by the model's profile or measured ratio (unchanged without one), and the source of its
    ratio."""
    if collection.model.spec.recurrent:
        return replace(blend, selector="all"), NO_RATIO
    profile, reason = profile_for(collection.model, conditions(collection, codec, blend))
    if profile is not None:
        return profile.applied(blend), f"model: {profile}"
    if (measured := _measured_ratio(collection, codec, blend)) is not None:
        return replace(blend, ratio=measured.ratio), f"model: {measured}"
    return blend, f"default: {reason}"


def _measured_ratio(collection: Collection, codec: str, blend: BlendParams) -> MeasuredRatio | None:
    """Return the ratio of the table if the model computes and blends as it was measured there."""
    model = collection.model
    is_changed = model.lora or model.weight_dtype != "auto" or collection.decoder.kv_scales is not None
    is_close = all(part.split()[0] in _CLOSE_CODECS for part in codec.split(" and "))
    if is_changed or not is_close or _way(blend) != _way(BlendParams()):
        return None
    return MEASURED_RATIOS.get(model.weights_digest)


def with_own_ratio(
    collection: Collection, chunks: Sequence[ChunkInput], ask: AskRequest, notes: list[str]
) -> tuple[BlendParams, str]:
    """Return the request's blending, or that of the model's profile if requested, and the source of its ratio. Notes
    report a profile that does not fit, and a ratio below the profile's."""
    blend, model = ask.blend, collection.model
    if ask.options.auto or blend.mode != "blend" or blend.checks:
        return blend, "auto" if ask.options.auto else "given"
    codec = stored_codec(chunks, collection)
    shown = notes if len(chunks) > 1 else []  # one chunk is exact
    if ask.options.own_ratio:
        own, source = own_blend(collection, blend, codec)
        if own.selector == "all" != blend.selector:
            shown.append(
                f"models check found no ratio close enough to a full prefill with {model.name}: all tokens that need repair are computed; "
                "--ratio X blends"
            )
        elif source.startswith(OTHER):
            shown.append(f"the ratio is the default, {blend.ratio:g}: {source.removeprefix('default: ')}")
        return own, source
    profile, _ = profile_for(model, conditions(collection, codec, blend))
    if profile is not None and ((found := profile.choice) is None or blend.effective_ratio() < found.ratio):
        needed = "use mode full" if found is None else f"it needs a ratio of {found.ratio:g}"
        shown.append(f"models check found blending with {model.name} to be far from a full prefill: {needed}")
    return blend, "given"
