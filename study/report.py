"""The study's tables: fills the `<!-- NAME -->` ... `<!-- end -->` blocks of pages; the prose is the pages'
own."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from settings import DEFAULT, handbook_groups

from cacheblend_cli.engine.profile import Profile
from cacheblend_cli.evaluation.bootstrap import Bootstrap, mean
from cacheblend_cli.evaluation.profile import distance_of, p90_limit
from cacheblend_cli.settings import Settings

STUDY = Path(__file__).parent
DOCS = STUDY.parent / "docs"
PAGES = (
    *(STUDY / f"{name}.md" for name in ("fidelity", "handbook", "claims", "models", "nearer", "own_ratio", "search")),
    DOCS / "fidelity.md",
)
MAIN_RATIO = 0.15
Row = dict[str, Any]
WITH_INTERVAL, PERCENT, SIGNED = "{0:.3f} ({1:.3f} to {2:.3f})", "{0:.1%}", "{0:+.3f} ({1:+.3f} to {2:+.3f})"
COLUMNS = {
    "exact_match": ("exact", PERCENT),
    "f1": ("F1", "{0:.3f}"),
    "norm_f1": ("NormF1 (95 %)", WITH_INTERVAL),
    "f1_difference": ("F1 minus full prefill's (95 %)", SIGNED),
    "first_token": ("first token", "{0:.0%}"),
    "kl": ("KL (95 %)", WITH_INTERVAL),
    "kl_median": ("median", "{0:.3f}"),
    "kl_p90": ("90th percentile", "{0:.3f}"),
    "top1": ("top-1", PERCENT),
    "same_answer": ("same answer", "{0:.0%}"),
    "same_start": ("same first 16", "{0:.0%}"),
    "k_error": ("K error", "{0:.3f}"),
    "less_default": ("KL minus default's (95 %)", SIGNED),
    "nearer": ("default nearer", "{0}"),
}


def write_pages(results: Path, pages: Iterable[Path] = PAGES) -> None:
    """Fill the pages from the results in a folder. A page that does not exist is made of the blocks alone."""
    blocks = blocks_of(read_results(results))
    for page in pages:
        empty = "\n\n".join(f"<!-- {name} -->\n<!-- end -->" for name in blocks) + "\n"
        text = page.read_text(encoding="utf-8") if page.exists() else empty
        for name, block in blocks.items():
            pattern = rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)"
            text = re.sub(pattern, lambda m, block=block: f"{m[1]}\n{block}\n\n{m[2]}", text, flags=re.DOTALL)
        page.write_text(text, encoding="utf-8")


def read_results(folder: Path) -> dict[str, Any]:
    """Return every result by its path below the folder, without ".json"."""
    paths = sorted(folder.rglob("*.json"))
    return {p.relative_to(folder).with_suffix("").as_posix(): json.loads(p.read_text(encoding="utf-8")) for p in paths}


def blocks_of(found: dict[str, Any]) -> dict[str, str]:
    """Return the text of each block by name."""
    blocks = {}
    for name, result in found.items():
        if name in TABLES:
            blocks[name] = TABLES[name](result)
        elif "rows" not in result or "set" not in result or "/" in name:
            continue
        elif name == "handbook":
            rows = {row["label"]: row for row in result["rows"]}
            blocks["handbook"] = about(result)
            for group, settings in handbook_groups().items():
                labels = ["full prefill"] * (group == "levels") + [s.label for s in settings]
                blocks[f"handbook {group}"] = table([rows[label] for label in labels if label in rows])
        else:
            ratios = ratios_of(result["rows"])
            is_long = len(ratios) > 3 or len(result["rows"]) > 30
            main = [MAIN_RATIO] if MAIN_RATIO in ratios and is_long else ratios
            shown = [row for row in result["rows"] if not row["ratio"] or row["ratio"] in main or row["ratio"] == 1]
            blocks[name] = about(result) + "\n\n" + table(shown)
            if is_long:
                blocks[f"{name} by ratio"] = by_ratio(result["rows"])
    for name, cell in SIDE_BY_SIDE:
        results = {MODEL_NAMES[model]: found[path] for path, model in MODELS[name].items() if path in found}
        if any("/" in path for path in MODELS[name] if path in found):
            blocks[f"{name}, {cell}"] = side_by_side(results, CELLS[cell])
    if answers := {model: found[f"{model}/answers"] for model in ANSWERED if f"{model}/answers" in found}:
        blocks |= {
            "answers": answers_table(answers),
            "answers by part": parts_table(answers),
            "answers in short": short_answers(answers),
        }
    for name in CODEC_MEASURES.keys() & found.keys():
        blocks[name] = codec_table(name, found[name])
    return blocks


def side_by_side(results: dict[str, Any], cell: Callable[[Row], str]) -> str:
    """Return a table of settings over models, by title. Rows that fewer than two models have are left out."""
    lines = ["| | " + " | ".join(results) + " |", "|---" * (len(results) + 1) + "|"]
    counts = (f"{r['questions']} of {r['asked']}" if "asked" in r else str(r["questions"]) for r in results.values())
    lines.append(f"| questions | {' | '.join(counts)} |")
    by_label = [{row["label"]: row for row in result["rows"]} for result in results.values()]
    for label in dict.fromkeys(label for rows in by_label for label in rows):
        cells = [cell(rows[label]) if label in rows else "" for rows in by_label]
        if sum(map(bool, cells)) > 1:
            lines.append(f"| {_title(label)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def answers_table(results: dict[str, Row]) -> str:
    """Return the scores of whole answers, by model and setting."""
    lines = ["| model | setting | exact | F1 | F1 minus full prefill's (95 %) | same answer | claim in no text |"]
    lines.append("|---" * 7 + "|")
    for model, result in results.items():
        name = f"{MODEL_NAMES[model]}, {result['questions']} questions"
        for row in result["rows"]:
            cells = [f"{row['exact_match']:.0%}", _number(row["f1"]), _signed(row.get("f1_difference"))]
            cells.append(f"{row['same_answer']:.0%}" if "same_answer" in row else "")
            lines.append(f"| {name} | {_title(row['label'])} | {' | '.join(cells)} | {row['unsupported']:.1%} |")
            name = ""
    return "\n".join(lines)


def short_answers(results: dict[str, Row]) -> str:
    """Return a table of settings over models: F1 minus full prefill's, and the share of the same answers."""
    lines = ["| | " + " | ".join(MODEL_NAMES[model] for model in results) + " |", "|---" * (len(results) + 1) + "|"]
    rows = {model: {row["label"]: row for row in result["rows"]} for model, result in results.items()}
    own = {model: max(of, key=lambda label: DEFAULT in label and of[label]["ratio"]) for model, of in rows.items()}
    lines.append(f"| questions | {' | '.join(str(result['questions']) for result in results.values())} |")
    lines.append(f"| F1 of a full prefill | {' | '.join(_number(of['full prefill']['f1']) for of in rows.values())} |")
    for title, label in (
        ("reuse", "reuse"),
        ("CacheBlend's selection .15", "CacheBlend 0.15"),
        ("default .15", f"{DEFAULT} 0.15"),
    ):
        lines.append(f"| {title} | {' | '.join(_short_answer(of[label]) for of in rows.values())} |")
    cells = (f"{_short_answer(of[own[model]])} (at {_title(own[model])[-3:]})" for model, of in rows.items())
    lines.append(f"| default, the model's own ratio | {' | '.join(cells)} |")
    return "\n".join(lines)


def _short_answer(row: Row) -> str:
    return f"{_signed(row['f1_difference'])} · {row['same_answer']:.0%}"


def parts_table(results: dict[str, Row]) -> str:
    """Return F1 of whole answers by part of the questions."""
    parts = list(dict.fromkeys(part["part"] for result in results.values() for part in result["parts"]))
    lines = ["| F1 | | " + " | ".join(parts) + " |", "|---" * (len(parts) + 2) + "|"]
    for model, result in results.items():
        by_part, name = {part["part"]: part["f1"] for part in result["parts"]}, MODEL_NAMES[model]
        for row in result["rows"]:
            cells = [_number(by_part[part][row["label"]]) if part in by_part else "" for part in parts]
            lines.append(f"| {name} | {_title(row['label'])} | {' | '.join(cells)} |")
            name = ""
    return "\n".join(lines)


def _title(label: str) -> str:
    """Return a label in words: "default (`query` with regression) .15"."""
    name, _, ratio = label.rpartition(" ")
    return f"{SETTING_NAMES.get(name, name)} {float(ratio):.2f}".replace("0.", ".") if "." in ratio else label


def _signed(value: list[float] | None) -> str:
    return "" if value is None else "{:+.3f} ({:+.3f} to {:+.3f})".format(*value)


def codec_table(name: str, result: Row) -> str:
    """Return a table of codecs over models, of a result of kv_codecs.py."""
    models = {model: {row["codec"]: row for row in result[model]} for model in MODEL_NAMES if model in result}
    lines = [
        f"| {CODEC_MEASURES[name]} | {' | '.join(MODEL_NAMES[model] for model in models)} |",
        "|---" * (len(models) + 1) + "|",
    ]
    for codec in dict.fromkeys(codec for rows in models.values() for codec in rows):
        sizes = [of[codec] for of in result["bits_per_value"].values() if codec in of]
        bits = f" ({max(sizes):.1f} bits)" if sizes else ""
        lines.append(f"| {codec}{bits} | {' | '.join(_codec_cell(rows.get(codec)) for rows in models.values())} |")
    return "\n".join(lines)


def _codec_cell(row: Row | None) -> str:
    if row is None:
        return ""
    more = f" · {_interval(row['minus_exact'])}" if "minus_exact" in row else ""
    return f"{_interval(row['kl'])} · {row['same']:.0%}{more} · {row['questions']}"


CODEC_MEASURES = {
    "kv_codecs": "KL (95 %) · same first 16 · questions",
    "kv_codecs-needles": "KL (95 %) · same first 16 · questions",
    "kv_codecs-blended": "KL (95 %) · same first 16 · KL minus that of exact KV (95 %) · questions",
}


def _number(value: float) -> str:
    """Return three decimals, or two digits of a smaller number, without the zero in front."""
    decimals = 3 if abs(value) >= 0.00995 or not value else min(5, 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}".replace("0.", ".", 1)


def _interval(value: list[float] | None) -> str:
    return "" if value is None else "{} ({} to {})".format(*map(_number, value))


def _kl(row: Row) -> str:
    return _interval(row.get("kl"))


def _tail(row: Row) -> str:
    if "kl_median" not in row or "kl_p90" not in row:
        return ""
    same = row["same_start"] if "same_start" in row else row["same_answer"]
    return f"{_number(row['kl_median'])} · {_number(row['kl_p90'])} · {same:.0%}"


def _paired(row: Row) -> str:
    return f"{_interval(row['less_default'])} · {row['nearer']}" if "less_default" in row else ""


def _correction(row: Row) -> str:
    return _interval(row.get("less_plain"))


CELLS: dict[str, Callable[[Row], str]] = {
    "kl": _kl, "tail": _tail, "paired": _paired, "correction": _correction,
}  # fmt: skip
MODEL_NAMES = {
    "smollm2": "SmolLM2-135M-Instruct",
    **dict.fromkeys(("qwen", "qwen2.5-coder-0.5b-instruct-q4_k_m"), "Qwen2.5-Coder-0.5B-Instruct"),
    **dict.fromkeys(("gemma", "gemma3-270m-q4_k_m"), "Gemma 3 270M"),
    "qwen-1.5b": "Qwen2.5-Coder-1.5B-Instruct",
}
SETTING_NAMES = {
    "query, regression": "default (`query` with regression)",
    "query": "`query`, no correction",
    "random": "random tokens, no correction",
    "random, regression": "random tokens with regression",
    "CacheBlend": "CacheBlend's selection",
    "CacheBlend, regression": "CacheBlend's selection with regression",
}
SIDE_BY_SIDE = (
    ("musique", "kl"), ("musique", "tail"), ("musique", "paired"), ("correction", "correction"), ("needles", "kl"), ("pages", "kl"),
    ("office", "kl"), ("baselines", "kl"), ("baselines", "paired"),
)  # fmt: skip
MODELS = {
    "musique": {
        "musique-main": "smollm2",
        "qwen/musique": "qwen",
        "gemma/musique": "gemma",
        "qwen-1.5b/musique": "qwen-1.5b",
    },
    "correction": {"smollm2/correction": "smollm2", "qwen/musique": "qwen", "gemma/musique": "gemma"},
    "needles": {
        "needles-main": "smollm2",
        "qwen/needles-2k": "qwen",
        "gemma/needles-2k": "gemma",
        "qwen-1.5b/needles-2k": "qwen-1.5b",
    },
    "pages": {"pages": "smollm2", "qwen/pages": "qwen", "gemma/pages": "gemma", "qwen-1.5b/pages": "qwen-1.5b"},
    "office": {"smollm2/office": "smollm2", "qwen/office": "qwen", "qwen-1.5b/office": "qwen-1.5b"},
    "baselines": {
        "musique-main": "smollm2",
        "qwen/baselines": "qwen",
        "gemma/baselines": "gemma",
        "qwen-1.5b/baselines": "qwen-1.5b",
    },
}
"""Tables of models side by side: result -> model."""
ANSWERED = ("smollm2", "gemma", "qwen", "qwen-1.5b")
"""Models whose whole answers were scored."""


def about(result: Row) -> str:
    """Return a sentence on model, questions and machine."""
    h = result["hardware"]
    half = f", {result['half']} half" if result["half"] != "all" else ""
    text = (
        f"{result['questions']} questions{half}; model `{result['model']}` in {result['dtype']}, greedy; {h['cpu']}, {h['cores']} cores, "
        f"{h['threads']} thread(s), torch {h['torch']}."
    )
    if "asked" in result:
        text = f"Of {result['asked']} questions those that full prefill answers at least in part: {text}"
    if timed := result.get("timed"):
        text += f" First token of a full prefill, one question: {timed['full_s']:.2f} s, {timed['hardware']['threads']} thread(s)."
    return _filled(text)


def _filled(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def table(rows: list[Row]) -> str:
    """Return a Markdown table with the columns that some row has a value for."""
    # full prefill has no row of its own if it is only the reference
    shown = [row for row in rows if "kl" in row or "exact_match" in row]
    names = [name for name in COLUMNS if any(row.get(name) is not None for row in shown)]
    lines = [
        f"| setting | ratio | work | {' | '.join(COLUMNS[n][0] for n in names)} |",
        "|---" * (len(names) + 3) + "|",
    ]
    for row in shown:
        is_full = row["label"] == "full prefill"
        cells = [method(row), "" if is_full else f"{row['ratio']:g}", "" if is_full else f"{row['work']:.1%}"]
        for name in names:
            value = row.get(name, [])
            cells.append(
                COLUMNS[name][1].format(*(value if isinstance(value, list) else [value])) if value != [] else ""
            )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def method(row: Row) -> str:
    """Return the label without its ratio."""
    name, _, last = row["label"].rpartition(" ")
    return name if name and last == f"{row['ratio']:g}" else row["label"]


def ratios_of(rows: list[Row]) -> list[float]:
    return sorted({row["ratio"] for row in rows if "kl" in row and row["ratio"]})


def by_ratio(rows: list[Row]) -> str:
    """Return a table of KL (mean / median), top-1 and same answer of every method over the ratios."""
    ratios = ratios_of(rows)
    lines = ["| setting | " + " | ".join(f"{r:g}" for r in ratios) + " |", "|---|" + "---|" * len(ratios)]
    for name in dict.fromkeys(method(row) for row in rows if "kl" in row and row["ratio"]):
        at = {row["ratio"]: row for row in rows if "kl" in row and method(row) == name}
        cells = [_short_cell(at[ratio]) if ratio in at else "" for ratio in ratios]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _short_cell(row: Row) -> str:
    same = row["same_answer"] if "same_answer" in row else row["same_start"]
    return f"{row['kl'][0]:.3f} / {row['kl_median']:.3f} · {row['top1']:.1%} · {same:.0%}"


def claims_tables(result: Row) -> str:
    """Return marks of unchanged and changed answers, and of blended ones that differ."""
    h = result["hardware"]
    lines = [
        _filled(f"{h['cpu']}, {h['cores']} cores, torch {h['torch']}."),
        "",
        "| set | answers | claims | not in the texts | changed figures marked | changed names marked |",
        "|" + "---|" * 6,
    ]
    for row in result["answers"] + result["languages"]:
        figures, names = (f"{marked} of {total}" for marked, total in (row["figure"], row["name"]))
        lines.append(
            f"| {row['set']} | {row['answers']} | {row['claims']} | {row['not_found']} | {figures} | {names} |"
        )
    drawn = ", ".join(f"{marked} of {total} {kind}s" for kind, (marked, total) in result["changed"].items())
    lines += ["", f"1,000 changes drawn from all but the last three sets: {drawn} are marked."]
    lines += ["", "| set | pairs | blended differs in a claim | of these marked | others marked |", "|" + "---|" * 5]
    lines += ["| " + " | ".join(str(value) for value in row.values()) + " |" for row in result["differing"]]
    times = ", ".join(f"{name} {value * 1000:.1f} ms" for name, value in result["seconds"].items())
    return "\n".join([*lines, "", f"Time, median: {times}."])


def search_table(result: Row) -> str:
    """Return recall and weak matches by set and kind of search."""
    columns = {
        "recall_at_1": "best chunk", "recall_at_5": "one of five", "recall_cut": "one of those kept", "hits_cut": "hits kept",
        "weak": "weak, own", "weak_of_others": "weak, others",
    }  # fmt: skip
    lines = [f"| questions | chunks | `--search` | {' | '.join(columns.values())} |", "|---" * (len(columns) + 3) + "|"]
    for row in result["results"]:
        cells = [(f"{row[c]:.1f}" if c == "hits_cut" else f"{row[c]:.1%}") if c in row else "" for c in columns]
        lines.append(f"| {row['questions']}, {row['count']} | {row['chunks']} | {row['by']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ratio_table(result: Row) -> str:
    """Return the ratio that `models check` chooses for each model and text, and how far it is on held-out questions."""
    lines = [
        "| model | text | ratio | prompts | made: mean + its error | 90th percentile | questions | held out: mean (95 %) "
        "| median | 90th percentile |",
        "|---" * 10 + "|",
    ]
    for one in result["models"]:
        profile, held = profile_of(one["made"]), {row["ratio"]: row["kl"] for row in one["held"]}
        cells = ["full prefill", *[""] * 7]
        if found := profile.choice:
            made = [str(profile.prompts), f"{found.mean:.3f} + {found.error:.3f}", f"{found.p90:.3f}"]
            cells = [f"{found.ratio:g}", *made, *_described(held.get(found.ratio, []))]
        lines.append(f"| {one['model']} | {one['text']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def profile_of(rows: list[Row]) -> Profile:
    """Return the profile that `models check` makes of these measurements."""
    limits = Settings()
    found = tuple(distance_of(row["ratio"], "regression", row["kl"]) for row in rows)
    return Profile({}, len(rows[0]["kl"]), limits.kl_mean, p90_limit(limits.kl_mean), found)


def _described(kl: list[float]) -> list[str]:
    """Return mean with interval, median and 90th percentile in words; nothing of nothing."""
    found = Bootstrap(len(kl)).interval(mean, kl)
    if found is None:
        return [""] * 4
    mean_kl = WITH_INTERVAL.format(found.value, found.low, found.high)
    return [str(len(kl)), mean_kl, f"{median(kl):.3f}", f"{np.percentile(kl, 90):.3f}"]


TABLES: dict[str, Callable[[Row], str]] = {
    "claims": claims_tables, "search_recall": search_table, "own_ratio": ratio_table,
}  # fmt: skip
"""Result -> its block."""
