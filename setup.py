"""The compiled part, which pyproject.toml cannot declare as optional: without a C compiler the package works too."""

import sys

from setuptools import Extension, setup

OPENMP = ["-fopenmp"] if sys.platform == "linux" else []  # torch's own library of it is what is then loaded

setup(
    ext_modules=[
        Extension(
            "cacheblend_kernels._cpu",
            ["kernels/cacheblend_kernels/cpu.c"],
            extra_compile_args=["-O2", "-ftree-vectorize", "-std=gnu11", "-Wno-psabi", *OPENMP],
            extra_link_args=OPENMP,
            optional=True,
        )
    ]
)
