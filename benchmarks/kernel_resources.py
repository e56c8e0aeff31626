"""Compile every kernel variant for sm_80, sm_90 and sm_100 and write what each takes. Runs without a GPU.

    python benchmarks/kernel_resources.py [--arch 80 --arch 90] [--family decode_attention] [--core] [--jobs 2]

Writes benchmarks/results/kernel_resources.json (every variant) and .md (a table a family). With --arch or --family only
their rows are compiled anew, and others stay as they are if toolchain and kernel sources are still the same; interrupted,
it writes what it has; --core writes nothing. Exits 1 when a kernel does not fit its architecture.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cacheblend_kernels.triton_backend
import torch
import triton
from kernel_compile import KernelResources, compile_variant
from kernel_variants import all_variants

RESULTS = Path(__file__).parent / "results"
ARCHS = (80, 90, 100)


def compile_index(task: tuple[int, int]) -> KernelResources:
    arch, index = task
    return compile_variant(list(all_variants(arch))[index], arch)


def markdown(rows: list[KernelResources], toolchain: dict[str, str], num_variants: int) -> str:
    spilling = [r for r in rows if r.spill_bytes]
    lines = [
        "# What each kernel takes on each architecture",
        "",
        "Written by `benchmarks/kernel_resources.py`: compiled here, run nowhere. "
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
    lines += ["", "## Attention, bf16, head_dim 128", "", "| variant | arch | warps | stages | registers |"]
    lines[-1] += " spill bytes | shared bytes | matrix instruction |"
    lines.append("|---|---|---|---|---|---|---|---|")
    lines += [
        f"| {r.family} {r.label} | sm_{r.arch} | {r.num_warps} | {r.num_stages} | {r.registers} | {r.spill_bytes} | "
        f"{r.shared_bytes} | {r.matrix} |"
        for r in rows
        if "attention" in r.family and "bf16 d128" in r.label
    ]
    if spilling:
        lines += ["", "## Variants that spill", "", "| variant | arch | registers | spill bytes |", "|---|---|---|---|"]
        lines += [f"| {r.family} {r.label} | sm_{r.arch} | {r.registers} | {r.spill_bytes} |" for r in spilling]
    return "\n".join(lines) + "\n"


def provenance() -> dict[str, str]:
    """Versions of everything between a kernel and its registers, and a digest of the kernels' sources."""
    found = {"torch": torch.__version__, "triton": triton.__version__}
    for name, tool in (("ptxas", triton.knobs.nvidia.ptxas), ("ptxas-blackwell", triton.knobs.nvidia.ptxas_blackwell)):
        text = subprocess.run([tool.path, "--version"], capture_output=True, text=True, check=True).stdout
        found[name] = text.split("release ")[1].split(",")[0]
    sources = sorted(Path(cacheblend_kernels.triton_backend.__path__[0]).glob("*.py"))
    found["sources"] = hashlib.blake2b(b"".join(p.read_bytes() for p in sources), digest_size=8).hexdigest()
    return found


def write(rows: list[KernelResources], toolchain: dict[str, str]) -> None:
    """These rows, and beside them those that stand."""
    path = RESULTS / "kernel_resources.json"
    old: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    order = {(arch, v.family, v.label): (arch, i) for arch in ARCHS for i, v in enumerate(all_variants(arch))}
    found = {(r.arch, r.family, r.label): r for r in rows}
    if old.get("toolchain") == toolchain:
        found = {(row["arch"], row["family"], row["label"]): KernelResources(**row) for row in old["kernels"]} | found
    rows = [found[key] for key in sorted(found.keys() & order.keys(), key=lambda key: order[key])]
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps({"toolchain": toolchain, "kernels": [asdict(row) for row in rows]}, indent=1) + "\n")
    (RESULTS / "kernel_resources.md").write_text(markdown(rows, toolchain, len(order)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, action="append", choices=ARCHS, help="only this architecture (repeatable)")
    families = sorted({variant.family for arch in ARCHS for variant in all_variants(arch)})
    parser.add_argument("--family", action="append", choices=families, help="only this kernel family (repeatable)")
    parser.add_argument("--core", action="store_true", help="only the variants of the quick check")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    tasks = [
        (arch, index)
        for arch in args.arch or ARCHS
        for index, variant in enumerate(all_variants(arch))
        if variant.family in (args.family or [variant.family]) and (variant.core or not args.core)
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
        print(f"interrupted: {len(tasks) - len(rows)} variants are not compiled", file=sys.stderr)
    if not args.core:
        write(rows, provenance())
    return 0 if all(row.fits for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
