"""What pyproject.toml cannot say for good yet: the compiled part, without which the package works too."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "cacheblend_kernels._load_kv",
            ["kernels/cacheblend_kernels/load_kv.c"],
            extra_compile_args=["-O3"],
            optional=True,  # no C compiler: torch's operations do its work
        )
    ]
)
