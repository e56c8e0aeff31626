"""The study's tables and plot: fills the `<!-- NAME -->` ... `<!-- end -->` blocks of pages; the prose is the pages'
own."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from settings import DEFAULT, handbook_groups

from cacheblend_cli.evaluation.plot import COLOURS, MARKERS, label_lines

STUDY = Path(__file__).parent
DOCS = STUDY.parent / "docs"
PAGES: dict[Path, Path | None] = {
    STUDY / "fidelity.md": STUDY / "fidelity.svg",
    STUDY / "handbook.md": None,
    STUDY / "claims.md": None,
    STUDY / "models.md": None,
    DOCS / "fidelity.md": None,
}
"""Each page, and where its plot goes."""
MAIN_RATIO = 0.15
SHOWN = ("hkvd", "query", "query, shifted", "random:2+draft, shifted", "query, regression")
TITLES = {"musique": "chunks of different documents", "pages": "chunks of one page, in order"}
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
    "found": ("contains reference", "{0:.0%}"),
    "likelihood": ("its likelihood", "{0:+.3f}"),
    "k_error": ("K error", "{0:.3f}"),
    "less_default": ("KL minus default's (95 %)", SIGNED),
    "nearer": ("default nearer", "{0}"),
}


def write_pages(results: Path, pages: dict[Path, Path | None]) -> None:
    """Fill the pages from the results in a folder. A page that does not exist is made of the blocks alone."""
    found = read_results(results)
    blocks = blocks_of(found)
    for page, plot in pages.items():
        empty = "\n\n".join(f"<!-- {name} -->\n<!-- end -->" for name in blocks) + "\n"
        text = page.read_text(encoding="utf-8") if page.exists() else empty
        for name, block in blocks.items():
            pattern = rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)"
            text = re.sub(pattern, lambda m, block=block: f"{m[1]}\n{block}\n\n{m[2]}", text, flags=re.DOTALL)
        page.write_text(text, encoding="utf-8")
        if plot is not None:
            draw({name: found[name] for name in TITLES if name in found}, plot)


def read_results(folder: Path) -> dict[str, Any]:
    """Return every result by its path below the folder, without ".json"."""
    paths = sorted(folder.rglob("*.json"))
    return {p.relative_to(folder).with_suffix("").as_posix(): json.loads(p.read_text(encoding="utf-8")) for p in paths}


def blocks_of(found: dict[str, Any]) -> dict[str, str]:
    """Return the text of each block by name."""
    blocks = {}
    for name, result in found.items():
        if name == "claims":
            blocks[name] = claims_tables(result)
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
            main = [MAIN_RATIO] if MAIN_RATIO in ratios and len(ratios) > 3 else ratios
            shown = [row for row in result["rows"] if not row["ratio"] or row["ratio"] in main or row["ratio"] == 1]
            blocks[name] = about(result) + "\n\n" + table(shown)
            if len(ratios) > 3:
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
            cells = [f"{row['exact_match'][0]:.0%}", _number(row["f1"][0]), _signed(row.get("f1_difference"))]
            cells.append(f"{row['same_answer'][0]:.0%}" if "same_answer" in row else "")
            lines.append(f"| {name} | {_title(row['label'])} | {' | '.join(cells)} | {row['unsupported'][0]:.1%} |")
            name = ""
    return "\n".join(lines)


def short_answers(results: dict[str, Row]) -> str:
    """Return a table of settings over models: F1 minus full prefill's, and the share of the same answers."""
    lines = ["| | " + " | ".join(MODEL_NAMES[model] for model in results) + " |", "|---" * (len(results) + 1) + "|"]
    rows = {model: {row["label"]: row for row in result["rows"]} for model, result in results.items()}
    own = {model: max(of, key=lambda label: DEFAULT in label and of[label]["ratio"]) for model, of in rows.items()}
    lines.append(f"| questions | {' | '.join(str(result['questions']) for result in results.values())} |")
    lines.append(
        f"| F1 of a full prefill | {' | '.join(_number(of['full prefill']['f1'][0]) for of in rows.values())} |"
    )
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
    return f"{_signed(row['f1_difference'])} · {row['same_answer'][0]:.0%}"


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
    return f"{_interval(row['kl'])} · {row['same'][0]:.0%}{more} · {row['questions']}"


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
    same = row.get("same_start") or row["same_answer"]
    return f"{_number(row['kl_median'][0])} · {_number(row['kl_p90'][0])} · {same[0]:.0%}"


def _paired(row: Row) -> str:
    return f"{_interval(row['less_default'])} · {row['nearer']}" if "less_default" in row else ""


def _correction(row: Row) -> str:
    return _interval(row.get("less_plain"))


def _nearer(row: Row) -> str:
    return f"{_number(row['kl'][0])} · {_number(row['kl_p90'][0])} · {row['share']:.2f}"


CELLS: dict[str, Callable[[Row], str]] = {
    "kl": _kl, "tail": _tail, "paired": _paired, "correction": _correction, "nearer": _nearer,
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
    ("office", "kl"), ("nearer", "nearer"), ("baselines", "kl"), ("baselines", "paired"),
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
    "nearer": {f"{model}/nearer": model for model in ("smollm2", "qwen", "gemma")},
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
    h, full = result["hardware"], result["rows"][0]
    half = f", {result['half']} half" if result["half"] != "all" else ""
    text = (
        f"{result['questions']} questions{half}; model `{result['model']}` in {result['dtype']}, greedy; {h['cpu']}, {h['cores']} cores, "
        f"{h['threads']} thread(s), torch {h['torch']}."
    )
    if "asked" in result:
        text = f"Of {result['asked']} questions those that full prefill answers at least in part: {text}"
    if "likelihood" in full and "found" in full:
        text += f" Full prefill's answers contain the reference in {full['found'][0]:.0%}"
        text += f"; log-likelihood of the reference {full['likelihood'][0]:.2f} nats a token."
    if timed := result.get("timed"):
        text += f" First token of a full prefill, one question: {timed['full_s']:.2f} s, {timed['hardware']['threads']} thread(s)."
    return _filled(text)


def _filled(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def table(rows: list[Row]) -> str:
    """Return a Markdown table with the columns that some row has a value for; likelihoods minus full prefill's."""
    full = next((row["likelihood"][0] for row in rows if row["label"] == "full prefill" and "likelihood" in row), 0.0)
    # full prefill has no row of its own if it is only the reference
    shown = [row for row in rows if "kl" in row or row.get("exact_match")]
    names = [name for name in COLUMNS if any(row.get(name) is not None for row in shown)]
    lines = [
        f"| setting | ratio | work | {' | '.join(COLUMNS[n][0] for n in names)} |",
        "|---" * (len(names) + 3) + "|",
    ]
    for row in shown:
        is_full = row["label"] == "full prefill"
        cells = [method(row), "" if is_full else f"{row['ratio']:g}", "" if is_full else f"{row['work']:.1%}"]
        for name in names:
            value = row.get(name)
            if value is not None and name == "likelihood":
                value = [value[0] - full, 0, 0]
            cells.append(
                "" if value is None else COLUMNS[name][1].format(*(value if isinstance(value, list) else [value]))
            )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(name: str, value: list[float]) -> str:
    form = COLUMNS[name][1]
    if name == "kl" and value[0] < 0.01:
        form = form.replace(".3f", ".2g")
    return form.format(*value)


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
    same = row.get("same_answer") or row["same_start"]
    return f"{row['kl'][0]:.3f} / {row['kl_median'][0]:.3f} · {row['top1'][0]:.1%} · {same[0]:.0%}"


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


def draw(found: dict[str, Row], path: Path) -> None:
    """Draw KL over the work, a line per method, a panel per set."""
    if not found:
        return
    figure = Figure(figsize=(6.2 * len(found), 4.6), layout=ConstrainedLayoutEngine(w_pad=0.15))
    for axes, (name, result) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        rows = [row for row in result["rows"] if "kl" in row]
        labels = []
        for place, shown in enumerate(SHOWN):
            points = sorted((r for r in rows if method(r) == shown and r["ratio"]), key=lambda r: r["work"])
            if len(points) < 2:
                continue
            values = [r["kl"][0] for r in points]
            spread = [[r["kl"][0] - r["kl"][1] for r in points], [r["kl"][2] - r["kl"][0] for r in points]]
            axes.errorbar([r["work"] for r in points], values, yerr=spread, marker=MARKERS[place], markersize=4,
                          color=COLOURS[place], capsize=2, linewidth=1.3)  # fmt: skip
            labels.append((shown, COLOURS[place], values[-1]))
        reuse = next(r["kl"][0] for r in rows if r["label"] == "reuse")
        axes.axhline(reuse, color="#d55e00", linestyle=":", linewidth=1)
        axes.text(0, reuse, " plain reuse", color="#d55e00", fontsize=8, va="bottom")
        axes.set_title(f"{TITLES[name]} ({result['questions']} questions)", fontsize=10)
        axes.set_xlabel("work: share of a full prefill of the chunks", fontsize=9)
        axes.set_ylabel("KL from full prefill, nats per token", fontsize=9)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        label_lines(axes, labels)
    figure.savefig(path, metadata={"Date": None})
