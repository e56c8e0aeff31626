"""Markdown of the results of `serve.py`, and its targets."""

from __future__ import annotations

import json
from typing import Any

FORMS = {
    "requests": "d", "rate": ".2f", "requests_per_s": ".3f", "tokens_per_s": ".1f", "ttft_s": ".2f", "ttft_p95_s": ".2f",
    "scheduling_share": ".2%", "prefix_cache_share": ".0%",
}  # fmt: skip
RATIOS = {
    "decode": "tokens/s of eight sequences over one, target: 3",
    "repeated composition": "TTFT over that of reuse, target: 1.2",
}


def table(result: dict[str, Any]) -> str:
    """Return a table of the cases with a request rate, the other figures as a list, and the targets."""
    lines = ["# Many questions at once", "", json.dumps(result["hardware"]), "", json.dumps(result["settings"]), ""]
    lines.append(
        "| case | requests | arrivals/s | requests/s | tokens/s | TTFT s | p95 | scheduling | prefix cache hits |"
    )
    lines.append("|---|" + "---|" * len(FORMS))
    figures = []
    for name, part in result["parts"].items():
        for case in part["cases"]:
            title = ", ".join(filter(None, (name, case.get("case"))))
            if "requests_per_s" in case:
                cells = [format(case[key], form) if key in case else "" for key, form in FORMS.items()]
                lines.append(f"| {title} | " + " | ".join(cells) + " |")
            else:
                values = (
                    f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in case.items() if k != "case"
                )
                figures.append(f"- {title}: " + ", ".join(values))
    return "\n".join([*lines, "", *figures, "", *(f"- {line}" for line in targets(result["parts"]))]).rstrip() + "\n"


def targets(parts: dict[str, Any]) -> list[str]:
    """Return a line per target that was measured."""

    def highest(*names: str) -> float:
        cases = [c for name, p in parts.items() if name.startswith(names) for c in p["cases"]]
        return max((c["requests_per_s"] for c in cases if "requests_per_s" in c), default=0.0)

    ours, full, baselines = highest("blend "), highest("full "), highest("transformers", "llama.cpp")
    lines = []
    if ours and full:
        lines.append(
            f"requests per second at saturation: {ours / full:.2f} x those of our own full prefill (target: 3)"
        )
    if ours and baselines:
        lines.append(
            f"requests per second at saturation: {ours / baselines:.2f} x those of the best baseline (target: 2)"
        )
    for name, target in RATIOS.items():
        lines += [f"{name}: {c['ratio']:.2f} x ({target})" for c in parts.get(name, {"cases": []})["cases"]]
    return lines
