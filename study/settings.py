"""The settings that are compared on each set: selectors, corrections, contexts, masks and published methods."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from published import published_settings

from cacheblend_cli.corpus.search import CONTEXTS
from cacheblend_cli.evaluation.evaluate import NOISE_FLOOR
from cacheblend_cli.evaluation.settings import Prefill, Setting
from cacheblend_cli.types import BlendParams

DEFAULT = "query, regression"
"""What `cacheblend ask` does; its label has the ratio behind it."""
MAIN_RATIOS, NARROW_RATIOS = (0.05, 0.15, 0.30), (0.05, 0.15)
SHIFTED: dict[str, Any] = {"correction": "mean-shift"}
REGRESSION: dict[str, Any] = {"correction": "regression"}


def one(label: str, context: str = "sink", prefill: Prefill | None = None, **config: Any) -> Setting:
    return Setting(label, BlendParams(**{"correction": "none", **config}), context, prefill)


def over(ratios: Iterable[float], name: str, selector: str, context: str = "sink", **config: Any) -> list[Setting]:
    """Return a setting per ratio, labelled "NAME RATIO", without a correction unless config has one."""
    return [one(f"{name} {r:g}", context, selector=selector, ratio=r, **config) for r in ratios]


def reuse(context: str = "sink", label: str = "reuse") -> Setting:
    return Setting(label, BlendParams(mode="reuse"), context)


def main_settings(ratios: Sequence[float] = MAIN_RATIOS, context: str = "sink") -> list[Setting]:
    """Return the settings that claims are made of: reuse, CacheBlend and random tokens with and without regression,
    query, the default."""
    return [
        reuse(context),
        *over(ratios, "CacheBlend", "hkvd", context, deviation="v"),
        *over(ratios, "CacheBlend, regression", "hkvd", context, deviation="v", **REGRESSION),
        *over(ratios, "query", "query", context),
        *over(ratios, "random", "random", context),
        *over(ratios, "random, regression", "random", context, **REGRESSION),
        *over(ratios, DEFAULT, "query", context, **REGRESSION),
    ]


def pair_settings() -> list[Setting]:
    """Return the default, and over chunks of which the first two are exact: with its ratio, and as many recomputed
    tokens."""
    return [
        reuse(),
        *over([0.15], DEFAULT, "query", **REGRESSION),
        *over([0.15, 0.225], "the first two exact", "query", "document", **REGRESSION),
    ]


def answer_settings() -> list[Setting]:
    """Return the settings whose answers are compared with the references."""
    return [
        reuse(),
        *over([0.15], "CacheBlend", "hkvd", deviation="v"),
        *over([0.15], DEFAULT, "query", **REGRESSION),
    ]


def leading_settings(context: str = "sink", ratios: Sequence[float] = NARROW_RATIOS) -> list[Setting]:
    """Return the settings that are measured on every set of real text."""
    return [
        reuse(context),
        *over(ratios, "hkvd", "hkvd", context),
        *over(ratios, "query", "query", context),
        *over(ratios, DEFAULT, "query", context, **REGRESSION),
    ]


def wide_settings() -> list[Setting]:
    """Return every method at every ratio, the published ones among them."""
    return [
        *leading_settings(ratios=MAIN_RATIOS),
        *published_settings(MAIN_RATIOS),
        *over(MAIN_RATIOS, "random", "random"),
        *over(MAIN_RATIOS, "perturb", "perturb"),
        *over(MAIN_RATIOS, "draft", "draft"),
        *over(MAIN_RATIOS, "random:2+draft, shifted", "random:2+draft", **SHIFTED),
        *over([0.15], "random, regression", "random", **REGRESSION),
    ]


def handbook_groups() -> dict[str, list[Setting]]:
    """Return the settings of each table of study/handbook.md."""
    three, two = (0.05, 0.15, 0.30), (0.05, 0.15)
    return {
        "levels": [reuse(), NOISE_FLOOR],
        "selectors": [
            *(s for n in ("random", "first", "hkvd", "perturb", "query", "draft") for s in over(three, n, n)),
        ],
        "corrections": [
            *over((0.05, 0.10, 0.15), "random, shifted", "random", **SHIFTED),
            *over(two, "query, shifted", "query", **SHIFTED),
            *over(two, "draft, shifted", "draft", **SHIFTED),
            *over((0.02, 0.05, 0.10, 0.15), "random:2+draft, shifted", "random:2+draft", **SHIFTED),
        ],
        "regression": [
            *over(two, "random, regression", "random", **REGRESSION),
            *over(two, DEFAULT, "query", **REGRESSION),
            *over(two, "random:2+draft, regression", "random:2+draft", **REGRESSION),
            *over(two, "query, document, regression", "query", "document", **REGRESSION),
        ],
        "contexts": [
            reuse("document", "reuse, document"),
            *over((0.02, 0.05, 0.15), "query, document", "query", "document"),
            *over(two, "hkvd, document", "hkvd", "document"),
            reuse("neighbours", "reuse, neighbours"),
            *over((0.15,), "hkvd, neighbours", "hkvd", "neighbours"),
            *over((0.15,), "query, neighbours", "query", "neighbours"),
        ],
    }


def handbook_settings() -> list[Setting]:
    return [setting for group in handbook_groups().values() for setting in group]


def context_settings() -> list[Setting]:
    """Return reuse and hkvd over chunks of every context."""
    return [
        setting
        for context in CONTEXTS
        for setting in (
            reuse(context, f"reuse, {context}"),
            one(f"hkvd 0.15, {context}", context, selector="hkvd", ratio=0.15),
        )
    ]
