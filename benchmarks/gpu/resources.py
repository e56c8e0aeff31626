"""Compile every kernel variant for sm_80, sm_90 and sm_100, and report registers, spills and shared memory. Needs no
GPU.

    python benchmarks/gpu/resources.py [--family decode_attention] [--jobs 2]

A complete run writes benchmarks/results/kernel_resources.md; a run over some of the variants prints its table. Exits 1
when a kernel does not fit its architecture.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import sys
from pathlib import Path

import cacheblend_kernels.triton_backend
import torch
import triton

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "support")]

from kernel_compile import KernelResources, compile_variant  # noqa: E402
from kernel_variants import all_variants  # noqa: E402
from machine import RESULTS, table, wrapped  # noqa: E402

ARCHS = (80, 90, 100)


def compile_index(task: tuple[int, int]) -> KernelResources:
    arch, index = task
    return compile_variant(list(all_variants(arch))[index], arch)


def markdown(rows: list[KernelResources]) -> str:
    sources = sorted(Path(cacheblend_kernels.triton_backend.__path__[0]).glob("*.py"))
    digest = hashlib.blake2b(b"".join(p.read_bytes() for p in sources), digest_size=8).hexdigest()
    spilling = [r for r in rows if r.spill_bytes]
    head = ("kernel", "arch", "variants", "registers, most", "spilling variants", "spill bytes, most")
    groups: dict[tuple[str, int], list[KernelResources]] = {}
    for r in rows:
        groups.setdefault((r.family, r.arch), []).append(r)
    cells = [
        (family, f"sm_{arch}", *map(str, (len(some), max(r.registers for r in some), sum(r.spill_bytes > 0 for r in some),
         max(r.spill_bytes for r in some), max(r.shared_bytes for r in some))), ", ".join(sorted({r.matrix for r in some} - {""})) or "none")
        for (family, arch), some in sorted(groups.items())
    ]  # fmt: skip
    lines = [
        "# Kernel resources by architecture",
        "",
        f"Written by `benchmarks/gpu/resources.py`: compiled, not run. torch {torch.__version__}, triton {triton.__version__}, "
        f"sources {digest}.",
        "",
        f"{len(rows)} variants; {len(spilling)} spill; {sum(not r.fits for r in rows)} do not fit.",
        "",
        *table((*head, "shared bytes, most", "matrix instruction"), cells),
    ]
    if spilling:
        spills = [(f"{r.family} {r.label}", f"sm_{r.arch}", str(r.registers), str(r.spill_bytes)) for r in spilling]
        lines += ["", "## Variants that spill", "", *table(("variant", "arch", "registers", "spill bytes"), spills)]
    return wrapped("\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    variants = {(arch, index): variant for arch in ARCHS for index, variant in enumerate(all_variants(arch))}
    families = sorted({variant.family for variant in variants.values()})
    parser.add_argument("--family", choices=families, help="only this kernel family")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    tasks = [task for task, variant in variants.items() if arguments.family in (None, variant.family)]
    rows = []
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        for row in pool.imap(compile_index, tasks):
            rows.append(row)
            print(f"[{len(rows)}/{len(tasks)}] sm_{row.arch} {row.family} {row.label}", file=sys.stderr)
    page = markdown(rows)
    if len(rows) == len(variants):
        (RESULTS / "kernel_resources.md").write_text(page, encoding="utf-8")
    print(page)
    return 0 if all(row.fits for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
