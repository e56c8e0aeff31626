"""Reading questions with their contexts: the two forms, lists and streams, and errors for bad data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cacheblend_cli.errors import NotFoundError, UsageError
from cacheblend_cli.evaluation.samples import Context, parse_samples, read_samples

ROW = {"question": "Who?", "answers": ["Mara"], "ctxs": [{"title": "A", "text": "one"}, {"title": "A", "text": "two"}]}


def test_json_lines_a_list_and_a_single_object_read_alike() -> None:
    lines = "\n".join(json.dumps(ROW) for _ in range(3))
    listed = json.dumps([ROW] * 3, indent=2)
    assert parse_samples(lines, "x") == parse_samples(listed, "x")
    assert len(parse_samples(lines, "x")) == 3
    assert parse_samples(json.dumps(ROW, indent=1), "x") == parse_samples(lines, "x", limit=1)


def test_answers_may_be_a_list_of_lists_or_absent() -> None:
    assert parse_samples(json.dumps({**ROW, "answers": [["a", "b"], ["c"]]}), "x")[0].answers == ("a", "b", "c")
    assert parse_samples(json.dumps({"question": "Who?", "ctxs": ROW["ctxs"]}), "x")[0].answers == ()


def test_numbered_chunks_with_a_query() -> None:
    [sample] = parse_samples(json.dumps({"0": "one", "1": "two", "chunk_num": 2, "query": "\n\nWho?"}), "x")
    assert (sample.question, sample.contexts, sample.answers) == ("Who?", (Context("one"), Context("two")), ())
    assert all(not c.before for c in sample.contexts)


def test_neighbours_of_one_title_are_one_page() -> None:
    titles = ["A", "A", "B", "A", "", ""]
    [sample] = parse_samples(
        json.dumps({"question": "q", "ctxs": [{"title": t, "text": str(i)} for i, t in enumerate(titles)]}), "x"
    )
    assert [c.before for c in sample.contexts] == [(), ("0",), (), (), (), ()]
    assert sample.contexts[1] == Context("1", "A", ("0",))


def test_other_fields_are_tags_and_do_not_name_the_sample() -> None:
    plain, tagged = parse_samples(json.dumps(ROW) + json.dumps({**ROW, "hops": 2}), "x")
    assert tagged.tags == {"hops": 2}
    assert plain.digest == tagged.digest
    other = parse_samples(json.dumps({**ROW, "answers": ["Jonas"]}), "x")[0]
    assert other.digest != plain.digest


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (json.dumps(ROW) + "\n{oops", "data.jsonl:2"),
        (json.dumps(ROW) + "\n\n" + json.dumps({**ROW, "question": " "}), "data.jsonl:3"),
        (json.dumps([ROW, {**ROW, "ctxs": []}], indent=0), "data.jsonl:18"),
        (json.dumps({**ROW, "ctxs": [{"text": "a"}, {"title": "b"}]}), "data.jsonl:1"),
        (json.dumps({**ROW, "answers": "Mara"}), "data.jsonl:1"),
        (json.dumps({**ROW, "answers": [1]}), "data.jsonl:1"),
        ('{"0": "a", "chunk_num": 2, "query": "q"}', "data.jsonl:1"),
        ('{"0": "a", "chunk_num": true, "query": "q"}', "data.jsonl:1"),
        ('{"0": "a", "chunk_num": 1}', "data.jsonl:1"),
        ("[1]", "data.jsonl:1"),
        ("[", "data.jsonl:1"),
        (f"[{json.dumps(ROW)}\n{json.dumps(ROW)}]", "data.jsonl:2"),
        ("", "data.jsonl"),
        ("[]", "data.jsonl"),
    ],
)
def test_bad_data_is_named_by_file_and_line(text: str, place: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_samples(text, "data.jsonl")
    assert caught.value.message.split()[0] == place


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes('{"question": "caf\xe9"}'.encode("latin-1"))
    for name in ("latin", "."):
        with pytest.raises(UsageError, match=str(tmp_path / name)):
            read_samples(tmp_path / name)
    with pytest.raises(NotFoundError, match="gone"):
        read_samples(tmp_path / "gone")


def test_the_held_out_questions_are_samples_of_several_chunks_a_page() -> None:
    samples = read_samples(Path(__file__).parents[1] / "demo/heldout.jsonl", limit=20)
    assert len(samples) == 20
    assert all(any(c.before for c in s.contexts) for s in samples)
    tags: set[Any] = set().union(*(s.tags for s in samples))
    assert {"across", "names"} <= tags
