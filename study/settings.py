"""The settings that are compared on each set: selectors, corrections, contexts, masks and published methods."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from published import published_settings
from research import nucleus
from variants import bottom_right, scaled_keys

from cacheblend_cli.corpus.search import CONTEXTS
from cacheblend_cli.evaluation.evaluate import NOISE_FLOOR
from cacheblend_cli.evaluation.settings import Prefill, Setting
from cacheblend_cli.types import BlendParams

DEFAULT = "query, regression"
"""What `cacheblend ask` does; its label has the ratio behind it."""
MAIN_RATIOS, WIDE_RATIOS, NARROW_RATIOS = (0.05, 0.15, 0.30), (0.05, 0.10, 0.15, 0.30), (0.05, 0.15)
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
        *over(ratios, "random:2+draft, shifted", "random:2+draft", context, **SHIFTED),
        *over(ratios, DEFAULT, "query", context, **REGRESSION),
    ]


def wide_settings() -> list[Setting]:
    """Return every method at every ratio, the published ones among them."""
    ratios = WIDE_RATIOS
    return [
        *leading_settings(ratios=ratios),
        *published_settings(ratios),
        *over(ratios, "random", "random"),
        *over(ratios, "perturb", "perturb"),
        *over(ratios, "draft", "draft"),
        *over(ratios, "random, shifted", "random", **SHIFTED),
        *over(ratios, "query, shifted", "query", **SHIFTED),
        *over(ratios, "draft, shifted", "draft", **SHIFTED),
        *over(ratios, "random:2+draft, regression", "random:2+draft", **REGRESSION),
        # 15 % of the work: the first of four chunks is exact
        *over([0.20], DEFAULT, "query", **REGRESSION),
        *over([0.15], "random:2+query, regression", "random:2+query", **REGRESSION),
        *over(ratios, "random, regression", "random", **REGRESSION),
        *over([0.15], "draft, regression", "draft", **REGRESSION),
    ]


def handbook_groups() -> dict[str, list[Setting]]:
    """Return the settings of each table of study/handbook.md."""
    three, two = (0.05, 0.15, 0.30), (0.05, 0.15)
    return {
        "levels": [reuse(), NOISE_FLOOR],
        "selectors": [
            *(s for n in ("random", "first", "hkvd", "perturb", "query", "draft") for s in over(three, n, n)),
        ],
        "budget": [
            *over((0.15,), "hkvd on v", "hkvd", deviation="v"),
            *over((0.15,), "hkvd on k and v", "hkvd", deviation="kv"),
            one("hkvd 1:0.3,3:0.15", selector="hkvd", checks=((1, 0.3), (3, 0.15))),
            one("perturb 1:0.3,3:0.15", selector="perturb", checks=((1, 0.3), (3, 0.15))),
            one("perturb at layer 3 0.15", selector="perturb", check_layer=3, ratio=0.15),
            *over((0.15,), "hkvd, runs of 4", "hkvd", block=4),
            *over((0.15,), "draft, runs of 4", "draft", block=4),
            one("query, nucleus .5 0.15", prefill=nucleus(0.5), selector="query", ratio=0.15),
            *over((0.15,), "first:4+query", "first:4+query"),
            *over((0.15,), "first:4+hkvd", "first:4+hkvd"),
        ],
        "corrections": [
            *over((0.05, 0.10, 0.15), "random, shifted", "random", **SHIFTED),
            *over(two, "first, shifted", "first", **SHIFTED),
            *over((0.15,), "hkvd, shifted", "hkvd", **SHIFTED),
            *over(two, "query, shifted", "query", **SHIFTED),
            *over(two, "draft, shifted", "draft", **SHIFTED),
            *over((0.02, 0.05, 0.10, 0.15), "random:2+draft, shifted", "random:2+draft", **SHIFTED),
            *(
                one(f"hkvd 0.15, keys x {f:g}", prefill=scaled_keys(f), selector="hkvd", ratio=0.15, **SHIFTED)
                for f in (0.9, 1.1)
            ),
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
            *over(two, "first, document", "first", "document"),
            *over(two, "random, document", "random", "document"),
            *over((0.05,), "draft, document", "draft", "document"),
            *over((0.05,), "query, document, shifted", "query", "document", **SHIFTED),
            reuse("neighbours", "reuse, neighbours"),
            *over((0.15,), "hkvd, neighbours", "hkvd", "neighbours"),
            *over((0.15,), "query, neighbours", "query", "neighbours"),
        ],
        "mask": [
            *(one(f"hkvd {r:g}, bottom-right", prefill=bottom_right, selector="hkvd", ratio=r) for r in three),
            *(
                one(f"{n} 0.15, bottom-right", prefill=bottom_right, selector=n, ratio=0.15)
                for n in ("random", "draft")
            ),
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
