"""Draw a command's terminal output with colours as SVG: `python -m tools.terminal OUT.svg WIDTH SECONDS COMMAND`.

The command runs in a tmux of that width; the picture shows the screen after so many seconds, or at the command's end.
"""

from __future__ import annotations

import io
import subprocess
import sys
import time

from rich.console import Console
from rich.text import Text

SERVER = ("tmux", "-L", "cacheblend-picture")
ROWS = 60


def main() -> None:
    out, width, seconds, command = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    size = ("-x", str(width), "-y", str(ROWS))
    subprocess.run([*SERVER, "new-session", "-d", *size, f"{command}; sleep 60"], check=True)
    try:
        time.sleep(seconds)
        shown = subprocess.run([*SERVER, "capture-pane", "-ep"], check=True, capture_output=True, text=True).stdout
    finally:
        subprocess.run([*SERVER, "kill-server"], check=False)
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(Text("$ " + command, style="bold green"))
    console.print(Text.from_ansi(shown.rstrip()))
    console.save_svg(out, title=command)
    print(shown.rstrip())


if __name__ == "__main__":
    main()
