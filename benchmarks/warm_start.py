"""What a user waits for with a running engine: from the start of the process to the first byte of the answer.

python benchmarks/warm_start.py [--runs 20]: over a store of the handbook in a directory of its own, with the handbook's model;
beside it `ask --local`, and the interpreter alone.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time

from cacheblend_cli.demo import handbook_dir

COMMAND = [sys.executable, "-c", "from cacheblend_cli.cli.main import main; main()"]
QUESTION = "Which team does Solveig Bergmann lead?"


def first_byte_s(command: list[str]) -> float:
    begun = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.read(1), f"no answer: {command}"
        seconds = time.perf_counter() - begun
        process.stdout.read()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"CACHEBLEND_STORE": f"{folder}/store", "CACHEBLEND_MODEL": "handbook"}
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
        subprocess.run([*COMMAND, "precompute", str(handbook_dir()), "-q"], check=True, stdout=subprocess.DEVNULL)
        subprocess.run([*COMMAND, "serve", "--background", "--port", "0"], check=True)
        try:
            print(f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}; medians of {runs}")
            for name, command in {
                "python alone": [sys.executable, "-c", "print(1)"],
                "ask, warm": [*COMMAND, "ask", QUESTION],
                "ask --local": [*COMMAND, "ask", QUESTION, "--local"],
            }.items():
                first_byte_s(command)
                found = [first_byte_s(command) for _ in range(runs if "local" not in name else 3)]
                print(f"{name:>14}  {statistics.median(found) * 1000:7.0f} ms  (least {min(found) * 1000:.0f})")
        finally:
            subprocess.run([*COMMAND, "serve", "--stop"], check=True)


if __name__ == "__main__":
    main()
