"""List the files, functions and lines of this project that one `cacheblend ask` enters.

    python tools/trace_ask.py [--json]

The handbook is precomputed into a temporary store, then one question is asked in this process. A function counts once,
with the lines of its definition.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections import defaultdict
from contextlib import redirect_stdout
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGES = ("cacheblend_cli", "cacheblend_documents", "cacheblend_store", "cacheblend_kernels")
QUESTION = "Which language does Leon Farrow speak?"


class Trace:
    """Records every function of the project that is entered within the context, in any thread."""

    def __init__(self) -> None:
        self.entered: set[CodeType] = set()

    def __enter__(self) -> Trace:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _note(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            self.entered.add(frame.f_code)

    def functions(self) -> dict[str, dict[str, int]]:
        """File (as the import system names it) -> function -> its lines. The bodies of modules and classes, which run
        when something is imported, and comprehensions are left out."""
        found: dict[str, dict[str, int]] = defaultdict(dict)
        for code in self.entered:
            parts = Path(code.co_filename).parts
            package = next((p for p in PACKAGES if p in parts[:-1]), None)
            if package is None or code.co_name.startswith("<") or not code.co_flags & CO_OPTIMIZED:
                continue
            last = max((line for _, _, line in code.co_lines() if line), default=code.co_firstlineno)
            file = "/".join(parts[len(parts) - 1 - parts[::-1].index(package) :])
            found[file][f"{code.co_qualname}:{code.co_firstlineno}"] = last - code.co_firstlineno + 1
        return dict(found)


def command(*arguments: str) -> None:
    """Run the tool in this process and discard its output. Raises SystemExit if it fails."""
    from cacheblend_cli.cli.main import main

    before, sys.argv = sys.argv, ["cacheblend", *arguments]
    try:
        main()
    except SystemExit as stop:
        if stop.code:
            raise
    finally:
        sys.argv = before


def trace_ask(folder: Path) -> dict[str, dict[str, int]]:
    from cacheblend_cli.demo import handbook_dir

    store = str(folder / "store")
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        command(
            "precompute",
            str(handbook_dir()),
            "--store",
            store,
            "--chunk-tokens",
            "56",
            "--model",
            "handbook",
            "--quiet",
        )
        with Trace() as trace:
            command("ask", QUESTION, "--model", "handbook", "--store", store, "--quiet")
    return trace.functions()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="cacheblend-trace-") as folder:
        found = trace_ask(Path(folder))
    rooms: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for file, functions in found.items():
        room = rooms["/".join(Path(file).parts[:2]) if file.count("/") > 1 else file.split("/")[0]]
        room[0] += 1
        room[1] += len(functions)
        room[2] += sum(functions.values())
    total = [sum(column) for column in zip(*rooms.values(), strict=True)]
    if "--json" in sys.argv:
        print(json.dumps({"total": total, "rooms": dict(sorted(rooms.items())), "files": found}, indent=1))
        return
    print(f"{'room':34}{'files':>7}{'functions':>11}{'lines':>7}")
    for name, (files, functions, lines) in sorted(rooms.items(), key=lambda item: -item[1][2]):
        print(f"{name:34}{files:7}{functions:11}{lines:7}")
    print(f"{'all':34}{total[0]:7}{total[1]:11}{total[2]:7}")


if __name__ == "__main__":
    main()
