"""The compiled part, which pyproject.toml cannot declare as optional: without a C compiler the package works too."""

import platform
import sys
from pathlib import Path

from setuptools import Extension, setup

OPENMP = ["-fopenmp"] if sys.platform == "linux" else []  # torch's own library of it is what is then loaded

FOLDER = "kernels/cacheblend_kernels"


def compiled(name: str) -> Extension:
    return Extension(
        f"cacheblend_kernels._{name}",
        [f"{FOLDER}/{name}.c"],
        depends=[f"{FOLDER}/cpu.c", *map(str, sorted(Path(FOLDER).glob("cpu/*.h")))],
        extra_compile_args=["-O2", "-ftree-vectorize", "-std=gnu11", "-Wno-psabi", *OPENMP],
        extra_link_args=OPENMP,
        optional=True,
    )


reads = Extension(
    "cacheblend_store._compiled_reads",
    ["store/cacheblend_store/compiled_reads.c"],
    extra_compile_args=["-O2", "-std=gnu11"],
    optional=True,
)
kernels = [compiled(name) for name in ("cpu", "cpu_avx2") if name == "cpu" or platform.machine() == "x86_64"]
setup(ext_modules=[*kernels, reads])
