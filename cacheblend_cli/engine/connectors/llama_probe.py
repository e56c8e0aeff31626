"""Time llama.cpp in a process of its own: `python -m cacheblend_cli.engine.connectors.llama_probe FILE THREADS`.

Prints {"decode_s"} (seconds of a token, the best of a few) or {"error"}. Code that the machine cannot run ends this
process and not the one that answers (ggml's AMX code dies with SIGILL on some virtual machines).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cacheblend_cli.engine.connectors.llama_cpp import LlamaCpp
from cacheblend_cli.engine.connectors.llama_library import LlamaError, library


def main(path: str, threads: str) -> None:
    try:
        found: dict[str, float | str] = {"decode_s": LlamaCpp(library(), Path(path), int(threads)).decode_s()}
    except LlamaError as error:
        found = {"error": error.message}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
