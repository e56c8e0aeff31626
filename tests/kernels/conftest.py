"""Kernel tests: `numeric/` runs in Triton's interpreter, and on a GPU if there is one.

The interpreter is chosen when a kernel is decorated, so one process either interprets or compiles: this one compiles,
and `test_interpreter.py` starts those that interpret.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for `cases`

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = [] if INTERPRETED or torch.cuda.is_available() else ["numeric"]
