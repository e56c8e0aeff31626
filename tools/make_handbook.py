"""Write the demo's corpus: `python -m tools.make_handbook cacheblend_cli/demo`. Seeded.

handbook/*.md and questions.jsonl: one company of 36 people. heldout.jsonl: questions over new contexts of 3 or 4 pages,
every third with names that training never has.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from tools.demo_model import world

NUM_PAGES, NUM_CONTEXTS, QUESTIONS_A_CONTEXT = 36, 156, 5


def write_handbook(out: Path, seed: int) -> None:
    rng, taken = random.Random(seed), set()
    (out / "handbook").mkdir(parents=True, exist_ok=True)
    questions = []
    for number in range(NUM_PAGES):
        person = world.make_person(rng, taken, "held_out" if number % 6 == 5 else "known")
        page = world.make_page(rng, person, rng.choice((3, 3, 4)))
        source = f"handbook/{person.name.lower().replace(' ', '-')}.md"
        (out / source).write_text("".join(page.chunk_texts()), encoding="utf-8")
        for fact in page.facts:
            question, answer, _ = world.ask(rng, person, fact)
            questions.append({"question": question, "answer": answer, "source": source, "across": fact.across})
    rng.shuffle(questions)
    _write_lines(out / "questions.jsonl", questions)


def write_heldout(out: Path, seed: int) -> None:
    rng, rows = random.Random(seed), []
    for number in range(NUM_CONTEXTS):
        taken: set[str] = set()
        split = "held_out" if number % 3 == 2 else "known"
        pages = [
            world.make_page(rng, world.make_person(rng, taken, split), rng.choice((3, 3, 4)))
            for _ in range(rng.choice((3, 3, 4)))
        ]
        ctxs = [{"title": p.person.name, "text": text} for p in pages for text in p.chunk_texts()]
        asked = [(p.person, fact) for p in pages for fact in p.facts]
        counts = {f.relation: sum(g.relation == f.relation for _, g in asked) for _, f in asked}
        rng.shuffle(asked)
        asked.sort(key=lambda item: counts[item[1].relation] < 2)  # ambiguous by relation first
        for person, fact in asked[:QUESTIONS_A_CONTEXT]:
            question, answer, _ = world.ask(rng, person, fact)
            row = {
                "question": question,
                "answers": [answer],
                "across": fact.across,
                "ambiguous": counts[fact.relation] > 1,
                "names": split,
                "ctxs": ctxs,
            }
            rows.append(row)
    _write_lines(out / "heldout.jsonl", rows)


def _write_lines(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=2024)
    arguments = parser.parse_args()
    write_handbook(arguments.out, arguments.seed)
    write_heldout(arguments.out, arguments.seed + 1)
