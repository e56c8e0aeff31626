"""Print the text of files. What was left out goes to stderr."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import closing
from pathlib import Path

from cacheblend_documents.conversion import convert, converter_process
from cacheblend_documents.converted import NotConverted
from cacheblend_documents.formats import reason_of_suffix


def main() -> int:
    """Return the exit status: 1 if a file was not converted."""
    parser = argparse.ArgumentParser("python -m cacheblend_documents", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help="file to read; - is stdin, as Markdown")
    status = 0
    with closing(converter_process()) as process:
        for name in parser.parse_args().files:
            try:
                data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
                converted = convert("-.md" if name == "-" else Path(name).name, data, process=process)
            except (OSError, NotConverted) as error:
                reason = error.strerror if isinstance(error, OSError) else reason_of_suffix(name) or error.reason
                print(f"{name}: {reason}", file=sys.stderr)
                status = 1
                continue
            sys.stdout.buffer.write(converted.text.encode())
            sys.stdout.buffer.flush()
            for omission in converted.omissions:
                print(f"{name}: left out: {omission}", file=sys.stderr)
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
