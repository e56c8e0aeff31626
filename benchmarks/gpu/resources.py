"""Compile every kernel variant for sm_80, sm_90 and sm_100, and report registers, spills and shared memory. Needs no
GPU.

    python benchmarks/gpu/resources.py [--arch 80 --arch 90] [--family decode_attention] [--core] [--jobs 2]

A complete run writes benchmarks/results/kernel_resources.md; a run over some of the variants prints its table. Exits 1
when a kernel does not fit its architecture.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import subprocess
import sys
from pathlib import Path

import cacheblend_kernels.triton_backend
import torch
import triton

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from kernel_compile import KernelResources, compile_variant  # noqa: E402
from kernel_variants import all_variants  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "kernel_resources.md"
ARCHS = (80, 90, 100)


def compile_index(task: tuple[int, int]) -> KernelResources:
    arch, index = task
    return compile_variant(list(all_variants(arch))[index], arch)


def markdown(rows: list[KernelResources], toolchain: dict[str, str], num_variants: int) -> str:
    spilling = [r for r in rows if r.spill_bytes]
    lines = [
        "# Kernel resources by architecture",
        "",
        "Written by `benchmarks/gpu/resources.py`: compiled, not run. "
        + ", ".join(f"{name} {version}" for name, version in toolchain.items())
        + ".",
        "",
        f"{len(rows)} of {num_variants} variants; {len(spilling)} spill; {sum(not r.fits for r in rows)} do not fit.",
        "",
        "| kernel | arch | variants | registers, most | spilling variants | spill bytes, most | shared bytes, most | matrix instruction |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for family in dict.fromkeys(r.family for r in rows):
        for arch in dict.fromkeys(r.arch for r in rows):
            some = [r for r in rows if r.family == family and r.arch == arch]
            if not some:
                continue
            matrix = ", ".join(sorted({r.matrix for r in some} - {""})) or "none"
            lines.append(
                f"| {family} | sm_{arch} | {len(some)} | {max(r.registers for r in some)} | "
                f"{sum(r.spill_bytes > 0 for r in some)} | {max(r.spill_bytes for r in some)} | "
                f"{max(r.shared_bytes for r in some)} | {matrix} |"
            )
    if spilling:
        lines += ["", "## Variants that spill", "", "| variant | arch | registers | spill bytes |", "|---|---|---|---|"]
        lines += [f"| {r.family} {r.label} | sm_{r.arch} | {r.registers} | {r.spill_bytes} |" for r in spilling]
    return "\n".join(lines) + "\n"


def provenance() -> dict[str, str]:
    """Return versions of the toolchain, and a digest of the kernels' sources."""
    found = {"torch": torch.__version__, "triton": triton.__version__}
    for name, tool in (("ptxas", triton.knobs.nvidia.ptxas), ("ptxas-blackwell", triton.knobs.nvidia.ptxas_blackwell)):
        text = subprocess.run([tool.path, "--version"], capture_output=True, text=True, check=True).stdout
        found[name] = text.split("release ")[1].split(",")[0]
    sources = sorted(Path(cacheblend_kernels.triton_backend.__path__[0]).glob("*.py"))
    found["sources"] = hashlib.blake2b(b"".join(p.read_bytes() for p in sources), digest_size=8).hexdigest()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, action="append", choices=ARCHS, help="only this architecture (repeatable)")
    families = sorted({variant.family for arch in ARCHS for variant in all_variants(arch)})
    parser.add_argument("--family", action="append", choices=families, help="only this kernel family (repeatable)")
    parser.add_argument("--core", action="store_true", help="only the variants of the quick check")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    all_tasks = {(arch, index): variant for arch in ARCHS for index, variant in enumerate(all_variants(arch))}
    tasks = [
        (arch, index)
        for (arch, index), variant in all_tasks.items()
        if arch in (args.arch or ARCHS)
        and variant.family in (args.family or [variant.family])
        and (variant.core or not args.core)
    ]
    rows = []
    try:
        with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
            for row in pool.imap(compile_index, tasks):
                rows.append(row)
                mark = "" if row.fits else "  DOES NOT FIT"
                print(
                    f"[{len(rows)}/{len(tasks)}] sm_{row.arch} {row.family} {row.label}: {row.registers} registers, "
                    f"{row.spill_bytes} B spilled, {row.shared_bytes} B shared{mark}",
                    file=sys.stderr,
                )
    except KeyboardInterrupt:
        print(f"interrupted: {len(tasks) - len(rows)} variants were not compiled", file=sys.stderr)
    table = markdown(rows, provenance(), len(all_tasks))
    if len(rows) == len(all_tasks):
        RESULTS.write_text(table, encoding="utf-8")
    print(table)
    return 0 if all(row.fits for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
