"""Conversion to types from several threads."""

from __future__ import annotations

import subprocess
import sys

_THREADS = """
import sys, threading
from dataclasses import make_dataclass
from typing import Annotated
from msgspec import Meta
from cacheblend_store.conversion import convert

sys.setswitchinterval(1e-6)
names = [f"f{i}" for i in range(12)]
values = {name: [1, 2] for name in names}
failed = []

def use(ready, of):
    ready.wait()
    try:
        assert convert({"one": values, "more": [values]}, of).more[0].f3 == (1, 2)
    except Exception as error:
        failed.append(error)

for n in range(200):
    One = make_dataclass("One", [(name, tuple[Annotated[int, Meta(ge=0, le=n + 9)], ...]) for name in names])
    Two = make_dataclass("Two", [("one", One), ("more", list[One])])
    ready = threading.Barrier(8)
    threads = [threading.Thread(target=use, args=(ready, Two)) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
print(failed)
"""


def test_many_threads_use_a_type_for_the_first_time() -> None:
    done = subprocess.run([sys.executable, "-c", _THREADS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr[-2000:]
