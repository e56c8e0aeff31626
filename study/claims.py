"""How well the check of claims (docs/gate.md) tells changed figures and names: the figures of study/claims.md.

    python study/claims.py answers --model MODEL --answers FILE.jsonl [--set SET --data FOLDER --questions N]
    python study/claims.py report FILE.jsonl ...

`answers` asks the questions of a set in full and blended, and appends to FILE, which it can continue. `report` looks up
the claims of these answers as they are, and with one digit, month or letter of a name changed; it writes
study/results/claims.json and the tables of study/claims.md, and prints every answer with a mark, to be read.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from questions import filler, musique, needles, office, spellable_samples
from report import write_pages
from results import hardware, write_result

from cacheblend_cli import Engine
from cacheblend_cli.claims import LookedUp, check
from cacheblend_cli.evaluation.samples import Sample

STUDY = Path(__file__).parent

SETS = {
    "handbook": lambda data: spellable_samples(),
    "office": lambda data: office(1) + office(1, seed=1),
    "needles": lambda data: needles(filler(data), 4),
    "musique": lambda data: musique(data, 4),
}
MODES = {"full": {"mode": "full"}, "blended": {"mode": "blend", "ratio": 0.15}}
SYSTEM = {
    "office": "Answer from the documents in two or three sentences. Give the numbers, names and times that matter.",
    "musique": "Answer from the documents in two or three sentences. Give the names and dates that matter.",
}


def ask(arguments: argparse.Namespace) -> None:
    """Append the answers that the file lacks."""
    path: Path = arguments.answers
    known = {(r["set"], r["number"]) for r in read([path])} if path.exists() else set()
    samples = SETS[arguments.set](arguments.data)[: arguments.questions]
    system = {"system": SYSTEM[arguments.set]} if arguments.set in SYSTEM else {}
    load = partial(Engine.load, arguments.model, max_tokens=96, threads=arguments.threads, **system)
    with load() as engine, path.open("a", encoding="utf-8") as out:
        for number, sample in enumerate(samples):
            if (arguments.set, number) not in known:
                for record in answered(engine, sample):
                    own = {"model": Path(arguments.model).name, "set": arguments.set, "number": number}
                    out.write(json.dumps(own | record) + "\n")
                out.flush()


def answered(engine: Engine, sample: Sample) -> Iterator[dict[str, Any]]:
    texts = [context.text for context in sample.contexts]
    engine.ask(sample.question, documents=texts, max_tokens=1)  # stores the KV
    for mode, settings in MODES.items():
        answer = engine.ask(sample.question, documents=texts, **settings)
        yield {"mode": mode, "question": sample.question, "passages": texts, "answer": answer.text}


# the check


def report(arguments: argparse.Namespace) -> None:
    """Write the figures of all files."""
    records = read(arguments.answers)
    rows = {
        "answers": [of_answers(name, own) for name, own in grouped(records, "set").items()],
        "languages": [of_answers(name, own) for name, own in in_languages().items()],
        "changed": of_changed(records),
        "differing": [of_differing(*pair) for pair in grouped(records, "set").items()],
        "seconds": of_time(),
    }
    result = {"hardware": hardware(), **rows}
    write_result(STUDY / "results" / "claims.json", result)
    write_pages(STUDY / "results", [STUDY / "claims.md"])
    for record in records:
        if marks := [claim.text for claim in looked_up(record) if claim.place is None]:
            print(record["model"], record["set"], record["mode"], marks, "|", record["answer"])


def in_languages() -> dict[str, list[dict[str, Any]]]:
    """Return answers in other languages that say what their passages say, by language."""
    found = json.loads((STUDY / "claims_languages.json").read_text(encoding="utf-8"))
    return {
        name: [
            {"question": question, "answer": answer, "passages": of["passages"]} for question, answer in of["answers"]
        ]
        for name, of in found.items()
    }


def grouped(records: list[dict[str, Any]], field: str) -> dict[str, list[dict[str, Any]]]:
    return {name: [r for r in records if r[field] == name] for name in dict.fromkeys(r[field] for r in records)}


def looked_up(record: dict[str, Any], answer: str | None = None) -> list[LookedUp]:
    return check(record["answer"] if answer is None else answer, [*record["passages"], record["question"]])


def of_answers(name: str, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Count claims and marks of unchanged answers, and marks of changed ones."""
    claims = [claim for record in records for claim in looked_up(record)]
    row: dict[str, Any] = {"set": name, "answers": len(records), "claims": len(claims)}
    row["not_found"] = sum(claim.place is None for claim in claims)
    for kind in ("figure", "name"):
        changes = [change for record in records for change in changed(record, kind)]
        row[kind] = [sum(is_marked(*change) for change in changes), len(changes)]
    return row


def of_changed(records: list[dict[str, Any]], count: int = 1000) -> dict[str, Any]:
    """Count the marks among `count` answers with one change, drawn from all."""
    changes = [(kind, *change) for kind in ("figure", "name") for r in records for change in changed(r, kind)]
    drawn = random.Random(0).sample(changes, min(count, len(changes)))
    marked = Counter(kind for kind, *change in drawn if is_marked(*change))
    return {kind: [marked[kind], total] for kind, total in Counter(kind for kind, *_ in drawn).items()}


MONTHS = "January February March April May June July August September October November December".split()


def changed(record: dict[str, Any], kind: str) -> Iterator[tuple[dict[str, Any], str, int]]:
    """Yield (record, answer, place of the change) with a digit, a month or a letter of a name changed to what no text
    of the prompt has."""
    answer, texts = record["answer"], "\n".join([*record["passages"], record["question"]])
    rng = random.Random(answer)
    for found in re.finditer(r"\d+" if kind == "figure" else r"[^\W\d_]{4,}", answer):
        word = found.group()
        if kind == "figure":
            at = rng.randrange(len(word))
            other = word[:at] + rng.choice([d for d in "123456789" if d != word[at]]) + word[at + 1 :]
        elif word in MONTHS:
            other = rng.choice([month for month in MONTHS if month != word])
        elif word[0].isupper() and re.search(rf"[^\W\d_] {word}\b", texts):  # a name within a sentence of the texts
            at = rng.randrange(1, len(word))
            other = word[:at] + rng.choice([c for c in "aeioulnrst" if c != word[at]]) + word[at + 1 :]
        else:
            continue
        if not re.search(
            rf"(?<![^\W_]){other}(?![^\W_])" if kind == "name" else rf"(?<![\d.,]){other}(?!\d|[.,]\d)", texts, re.I
        ):
            yield record, answer[: found.start()] + other + answer[found.end() :], found.start()


def is_marked(record: dict[str, Any], answer: str, place: int) -> bool:
    return any(c.place is None and c.start <= place < c.end for c in looked_up(record, answer))


def of_differing(name: str, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Count the blended answers that differ from full prefill's in a claim, and those of them that are marked."""
    pairs: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for record in records:
        pairs.setdefault((record["model"], record["number"]), {})[record["mode"]] = record
    differing, marked, marked_others = 0, 0, 0
    for pair in pairs.values():
        ours, theirs = looked_up(pair["blended"]), looked_up(pair["full"])
        differs = {c.text.lower() for c in ours} != {c.text.lower() for c in theirs}
        is_unsupported = any(claim.place is None for claim in ours)
        differing += differs
        marked += differs and is_unsupported
        marked_others += not differs and is_unsupported
    return {"set": name, "pairs": len(pairs), "differing": differing, "marked": marked, "others_marked": marked_others}


def of_time() -> dict[str, float]:
    """Return the median seconds for an answer of 2,000 characters over 20 passages of 2,500: as written in them, and
    with one figure that they lack."""
    text = "".join(
        (STUDY.parent / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("serve", "store", "speed")
    )
    passages, answer = [text[i * 2500 : (i + 1) * 2500] for i in range(20)], text[3000:5000]
    found = {}
    for name, asked in (("as written", answer), ("one figure missing", answer + " It has 987654 rows.")):
        times = []
        for _ in range(21):
            start = time.perf_counter()
            check(asked, passages)
            times.append(time.perf_counter() - start)
        found[name] = statistics.median(times)
    return found


def read(paths: list[Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    asking = commands.add_parser("answers")
    asking.add_argument("--model", required=True)
    asking.add_argument("--answers", type=Path, required=True)
    asking.add_argument("--set", choices=SETS, default="office")
    asking.add_argument("--data", type=Path, help="folder with musique_dev.json")
    asking.add_argument("--questions", type=int)
    asking.add_argument("--threads", type=int, default=2)
    asking.set_defaults(run=ask)
    reporting = commands.add_parser("report")
    reporting.add_argument("answers", type=Path, nargs="+")
    reporting.set_defaults(run=report)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
