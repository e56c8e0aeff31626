"""Chat templates are programs from elsewhere: each is rendered within limits, in a process that the caller survives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from cacheblend_documents import limited_process
from checkpoints import write_tokenizer
from killing import killed_at_work

from cacheblend_cli.errors import TemplateFailed, UsageError
from cacheblend_cli.model import template_process
from cacheblend_cli.model.template_process import TemplateLimits, render

NOW = datetime(2026, 11, 24)
LIMITS = TemplateLimits(seconds=0.2, memory=200 << 20, source=1 << 20, added=1 << 16)
NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"


@pytest.fixture(autouse=True)
def process() -> Iterator[limited_process.LimitedProcess]:
    yield template_process._PROCESS
    template_process._PROCESS.close()


def rendered(source: str, limits: TemplateLimits | None = None) -> str:
    return render(source, {"messages": [], "tools": None}, {}, NOW, limits).text


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (NESTED, "it takes more than 0.2 s of CPU time to render"),
        ("{{ 10 ** (10 ** 9) }}", "it takes more than 0.2 s of CPU time to render"),  # while it is compiled
        ("{{ 'a' * 10 ** 10 }}", "it needs more than 200 MiB of memory to render"),
        ("{{ 'a'.ljust(3 * 10 ** 9) }}", "it needs more than 200 MiB of memory to render"),
        ("{{ '%3000000000d'|format(1) }}", "it needs more than 200 MiB of memory to render"),
        ("{{ [1] * 10 ** 9 }}", "it needs more than 200 MiB of memory to render"),
        (DOUBLING, "it needs more than 200 MiB of memory to render"),
        ("{{ 'a ' * 10 ** 6 }}", "its result has 2,000,000 characters"),
        ("{{ 1 }}" * 200_000, "it has 1,400,000 characters; the limit is 1,048,576"),
        ("{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}", "it is nested too deeply"),
        ("{{ lipsum(n=10) }}", "'lipsum' is undefined"),
        ("{{ 10 ** 5000 }}", "Exceeds the limit"),
        ("{% break %}", "SyntaxError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception('x' * 10 ** 6) }}", "x" * 2000),
    ],
)
def test_a_template_beyond_a_limit_is_refused_with_the_limit(source: str, reason: str) -> None:
    limits = LIMITS if "CPU time" in reason else replace(LIMITS, seconds=10.0)  # copying takes time on a slow machine
    with pytest.raises(TemplateFailed) as refused:
        rendered(source, limits)
    assert reason in refused.value.reason
    assert len(refused.value.message) < 2100
    assert rendered("{{ 1 }}", LIMITS) == "1"


def test_what_a_template_refuses_itself_is_told_as_before() -> None:
    with pytest.raises(TemplateFailed, match="only users") as refused:
        rendered("{{ raise_exception('only users') }}")
    assert refused.value.hint == "check chat_template in the model directory"
    with pytest.raises(TemplateFailed, match="'style' is undefined") as refused:
        rendered("{{ style.name }}")
    assert "it knows: style" in str(refused.value.hint)
    with pytest.raises(TemplateFailed, match="TypeError"):
        rendered("{% for tool in tools %}{{ tool }}{% endfor %}")
    with pytest.raises(UsageError, match="no variable 'other'") as unknown:
        render("{{ style }}", {}, {"other": 1}, NOW)
    assert unknown.value.hint == "it has: style"


def test_texts_and_variables_arrive_as_they_are() -> None:
    given = {"messages": [{"role": "user", "content": "\ud800 <b>\u00e9</b>\r\n\0"}]}
    variables = {"a": [1, 2**70, None, True, {"b": 0.5}]}
    assert render("{{ messages[0].content }}{{ a }}", given, variables, NOW).text == (
        "\ud800 <b>\u00e9</b>\r\n\0[1, 1180591620717411303424, None, True, {'b': 0.5}]"
    )


def test_it_is_known_whether_the_date_was_printed() -> None:
    printed = render("{{ strftime_now('%d %b %Y %H:%M') }}", {}, {}, NOW)
    assert (printed.text, printed.has_date) == ("24 Nov 2026 00:00", True)
    assert not render("{% if strftime_now is defined %}x{% endif %}", {}, {}, NOW).has_date


def test_one_process_renders_all_templates(process: limited_process.LimitedProcess) -> None:
    rendered("{{ 1 }}")
    started = process._process
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda n: rendered(f"{{{{ {n} + 1 }}}}"), range(64)))
    assert texts == [str(n + 1) for n in range(64)]
    assert process._process is started is not None


def test_after_a_crash_another_process_renders(
    process: limited_process.LimitedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered("{{ 1 }}")
    with killed_at_work(process, monkeypatch), pytest.raises(TemplateFailed, match=r"crashed \(signal 9\)"):
        rendered("{{ 1 }}")
    assert rendered("{{ 2 }}") == "2"


def test_a_process_that_was_killed_while_it_waited_is_started_again(process: limited_process.LimitedProcess) -> None:
    assert rendered("{{ 1 }}") == "1"
    assert process._process is not None
    pid = process._process.pid
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert rendered("{{ 2 }}") == "2"


def test_a_process_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object, **kwargs: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refused)
    with pytest.raises(TemplateFailed, match="cannot be started: Resource temporarily unavailable") as told:
        rendered("{{ 1 }}")
    assert "ulimit" in str(told.value.hint)


def test_an_interrupt_leaves_no_answer_for_the_next_template(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(stream: object) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(limited_process, "_receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rendered("{{ 1 }}")
    assert rendered("{{ 2 }}") == "2"


def test_a_fork_has_a_process_of_its_own(process: limited_process.LimitedProcess) -> None:
    """Even if another thread waits for an answer at that moment."""
    rendered("{{ 1 }}")
    slow = replace(LIMITS, seconds=1.0)
    thread = threading.Thread(target=lambda: suppress_failure(slow))
    thread.start()
    while not process._lock.locked():
        pass
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        found = b"no text"
        with suppress(BaseException):
            found = rendered("{{ 'of the child' }}").encode()
        os.write(write, found)
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 99) == b"of the child"
    thread.join()
    assert rendered("{{ 3 }}") == "3"


def suppress_failure(limits: TemplateLimits) -> None:
    with suppress(TemplateFailed):
        rendered(NESTED, limits)


def test_the_process_ends_with_its_parent_which_never_imports_jinja(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    code = f"""
import sys
from datetime import datetime
from pathlib import Path
from cacheblend_cli.model import template_process
from cacheblend_cli.model.tokenizer import Tokenizer

tokenizer = Tokenizer(Path({str(tmp_path)!r}))
assert tokenizer.render([dict(role="user", content="who?")], datetime.now(), {{}}).text
print("jinja2" in sys.modules, template_process._PROCESS._process.pid)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported, pid = done.stdout.split()
    assert imported == "False"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
