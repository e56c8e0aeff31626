"""Draw a command's real output as SVG: `python -m tools.screenshot OUT.svg -- cacheblend demo`."""

from __future__ import annotations

import io
import os
import subprocess
import sys

from rich.console import Console
from rich.text import Text


def main() -> None:
    out, _, *command = sys.argv[1:]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        env={**os.environ, "NO_COLOR": "1"},
    )
    console = Console(record=True, width=118, file=io.StringIO())
    console.print(Text("$ " + " ".join(command), style="bold green"))
    for line in done.stdout.splitlines():
        style = "cyan" if line.startswith(">") else "dim" if line.startswith("[") else ""
        console.print(Text(line, style=style))
    console.save_svg(out, title=" ".join(command))


if __name__ == "__main__":
    main()
