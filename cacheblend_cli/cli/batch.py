"""`ask --batch`: many questions side by side, answered in the order of the file, and where an earlier run left off."""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_cli.cli.inputs import Asked
from cacheblend_cli.cli.output import Output
from cacheblend_cli.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from cacheblend_store import ChunkStore

    from cacheblend_cli.api import Answer, Engine
    from cacheblend_cli.runtime.service import Job


@dataclass(frozen=True)
class Answered:
    """A question of the batch and what came of it."""

    asked: Asked
    job: Job | None
    answer: Answer | None
    error: Exception | None = None


def answer_all(
    engine: Engine, store: ChunkStore, asked: Sequence[Asked], job_of: Callable[[Asked], Job], concurrency: int
) -> Iterator[Answered]:
    """Answer `concurrency` questions at a time, and give them in order, as soon as all before them are there.

    What an answer is does not depend on those beside it: no KV that was blended for one question serves another.
    """
    from cacheblend_cli.runtime.service import Done, Event, Limits, Service

    limits = Limits(max_waiting=len(asked) + 1, max_sequences=concurrency, hot_blended=False)
    service = Service(engine.runtime, store, limits)
    running: deque[tuple[Asked, Job | None, Future[Event], Exception | None]] = deque()

    def submit(item: Asked) -> None:
        last: Future[Event] = Future()

        def heard(event: Event) -> None:
            if not isinstance(event, Done) and not hasattr(event, "error"):
                return
            last.set_result(event)

        job: Job | None = None
        try:
            job = service.run(lambda runtime: job_of(item)).result()
            service.submit(job, heard)
            running.append((item, job, last, None))
        except Exception as error:
            running.append((item, job, last, error))

    def next_answered() -> Answered:
        item, job, last, error = running.popleft()
        if error is None:
            event = last.result()
            if isinstance(event, Done):
                return Answered(item, job, event.answers[0])
            error = getattr(event, "error")  # noqa: B009
        return Answered(item, job, None, error)

    try:
        for item in asked:
            submit(item)
            while running and (len(running) > 2 * concurrency or running[0][3] or running[0][2].done()):
                yield next_answered()
        while running:
            yield next_answered()
    finally:
        service.close()


class Results:
    """Where --resume keeps the answers of a batch: JSON lines in the order of the questions.

    A line that was not written to its end is dropped; what it was to answer is asked again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._answered: Counter[str] = Counter()
        whole = 0
        for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else ():
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            self._answered[_question_of(line, path)] += 1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = path.open("ab")
            self._stream.truncate(whole)
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}", "name another file for --resume") from error

    def left(self, asked: Sequence[Asked]) -> list[Asked]:
        """Those of the questions that the file does not answer. One that is asked twice is answered twice."""
        answered, found = Counter(self._answered), []
        for item in asked:
            if answered[item.question] > 0:
                answered[item.question] -= 1
            else:
                found.append(item)
        return found

    def add(self, record: dict[str, Any]) -> None:
        self._stream.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def _question_of(line: bytes, path: Path) -> str:
    try:
        question = json.loads(line)["question"]
        if isinstance(question, str):
            return question
    except (ValueError, KeyError, TypeError):
        pass
    raise UsageError(f"{path} holds something else than answers of a batch", "name another file for --resume")


def run_batch(
    answered: Iterator[Answered],
    show: Callable[[Answered], dict[str, Any]],
    output: Output,
    *,
    as_json: bool,
    results: Results | None,
) -> list[int]:
    """Show the answers as they come. A question that cannot be answered is reported, and the others go on. Returns the exit
    codes of those. show: shows an answer and gives its record."""
    from cacheblend_store import AmbiguousId, ChunkNotFound

    from cacheblend_cli.cli.exits import report

    started, failed, count, tokens = time.perf_counter(), [], 0, 0
    for item in answered:
        if not as_json:
            output.note(f"> {item.asked.question}")
        if item.answer is not None:
            record = show(item)
            count, tokens = count + 1, tokens + len(item.answer.generated_ids)
        elif isinstance(item.error, UsageError | NotFoundError | ChunkNotFound | AmbiguousId):
            record = {"question": item.asked.question, "error": item.error.message}
            failed.append(report(item.error, output))
            if as_json:
                output.json(record)
        else:
            assert item.error is not None
            raise item.error
        if results is not None and item.answer is not None:
            results.add(record)
    seconds = time.perf_counter() - started
    if count > 1:
        output.note(
            f"{count} answers in {seconds:.1f} s: {count / seconds:.2f} questions/s, {tokens / seconds:.1f} tokens/s"
        )
    return failed
