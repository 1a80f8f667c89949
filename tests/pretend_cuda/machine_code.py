"""The machine code of attention's kernels: registers, spills, and instructions for a pair of query and key.

    .venv-cuda/bin/python -m tests.pretend_cuda -m tests.pretend_cuda.machine_code

prints the table of docs/gpus.md: each variant of benchmarks/attention.py, compiled for an H100 and not run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch.nn.attention.flex_attention import flex_attention

from benchmarks.attention import ROW, VARIANTS, mask_of, states
from benchmarks.update import Work
from trainer.algorithm.attention_layout import TILE, tiles

REGISTERS, SHARED, WARP = 65_536, 227 * 1024, 32
"""Registers and bytes of shared memory of an H100's multiprocessor, and threads of a warp."""


@dataclass(frozen=True)
class Loop:
    """An innermost loop of a kernel."""

    instructions: int
    spills: int
    """Loads and stores of spilled registers."""
    products: int


@dataclass(frozen=True)
class Kernel:
    """A kernel's machine code."""

    is_backward: bool
    warps: int
    shared: int
    """Bytes of shared memory."""
    registers: int
    loops: tuple[Loop, ...]
    """The loops that hold matrix products."""

    @property
    def spills(self) -> int:
        """Loads and stores of spilled registers within the loops."""
        return sum(loop.spills for loop in self.loops)

    @property
    def resident_warps(self) -> int:
        """Warps that a multiprocessor has room for."""
        of_block = -(-self.registers // 8) * 8 * WARP * self.warps
        return min(REGISTERS // of_block, SHARED // (self.shared + 1024)) * self.warps

    def instructions(self, pairs: int) -> tuple[float, float]:
        """Return a thread's instructions for a pair in tiles with a mask and in whole ones; a step has ``pairs``.

        A forward kernel has a loop of each kind. A backward kernel has two, with three products and with four.
        """
        of_products: dict[int, list[int]] = {}
        for loop in self.loops:
            of_products.setdefault(loop.products, []).append(loop.instructions)
        threads = self.warps * WARP
        masked, whole = (sum(choose(n) for n in of_products.values()) for choose in (max, min))
        return masked * threads / pairs, whole * threads / pairs


SMALL = Work("", prompts=3, group_size=4, prompt_tokens=40, completion_tokens=40)


def compiled(width: int, options: dict[str, Any]) -> list[Kernel]:
    """Compile attention with a mask of trees, and return its kernels, forward first. Nothing is run."""
    torch._dynamo.reset()
    with TemporaryDirectory() as caches, pytest.MonkeyPatch.context() as patch, config.patch(compile_threads=1):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{caches}/inductor")
        patch.setenv("TRITON_CACHE_DIR", f"{caches}/triton")
        layout = mask_of(SMALL)
        mask = layout.each(Tensor.cuda).prepared()[None]
        attend = torch.compile(flex_attention, dynamic=True, fullgraph=True)
        attend(
            *states(width, len(layout.ends)), block_mask=mask, enable_gqa=True, kernel_options=options
        ).sum().backward()
        kernels = map(_kernel, Path(caches, "triton").rglob("*tem_*.cubin"))
        return sorted(kernels, key=lambda kernel: kernel.is_backward)


def _kernel(path: Path) -> Kernel:
    import triton  # a part of torch's build for CUDA alone

    about = json.loads(path.with_suffix(".json").read_text())
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    used = _output(tools / "cuobjdump", "-res-usage", path)
    registers = int(re.findall(r"REG:(\d+)", used)[0])
    loops = _loops(_output(tools / "nvdisasm", "-c", path))
    return Kernel("backward" in path.name, about["num_warps"], about["shared"], registers, loops)


def _output(*command: object) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _loops(assembly: str) -> tuple[Loop, ...]:
    """Return the innermost loops with matrix products; a loop ends with a branch back to its label."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    spans: list[tuple[int, int]] = []
    for line in assembly.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(instructions)
        if found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([^;]+);", line):
            instructions.append(found[1])
            target = re.search(r"BRA.*`\((\.L_\w+)\)", found[1])
            if target and target[1] in labels:
                spans.append((labels[target[1]], len(instructions)))
    inner = [(a, b) for a, b in spans if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in spans)]
    counts = [(b - a, Counter(re.split(r"[ .]", text)[0] for text in instructions[a:b])) for a, b in inner]
    loops = [Loop(n, by_name["STL"] + by_name["LDL"], by_name["HGMMA"]) for n, by_name in counts]
    return tuple(loop for loop in loops if loop.products)


def pairs_of_step(kernel: Kernel, options: dict[str, Any], width: int) -> int:
    """Return the pairs of a step of a kernel's loops, by its options or by torch's choice for an H100."""
    if kernel.is_backward:
        return int(options.get("bwd_BLOCK_M1", 64) * options.get("bwd_BLOCK_N1", 128))
    return int(options.get("fwd_BLOCK_M", 128) * options.get("fwd_BLOCK_N", 128 if width == 64 else 64))


def useful(masked: float, whole: float, layout: Any) -> float:
    """Return a thread's instructions for a pair that a token sees, over the tiles of a layout."""
    partial_tiles, whole_tiles = (int(seen.sum()) for seen in tiles(layout.ends.long()))
    seen = int((layout.ends - torch.arange(len(layout.ends))).sum())
    return (masked * partial_tiles + whole * whole_tiles) * TILE**2 / seen


def main(arguments: Sequence[str]) -> None:
    """Print the table of the variants, or of those whose names contain an argument."""
    layout = mask_of(ROW)
    print("head, variant, pass | registers | spills | warps | masked | whole | useful")
    for (width, name), options in VARIANTS.items():
        if options["BACKEND"] != "TRITON" or not any(part in f"{width} {name}" for part in arguments or [""]):
            continue
        for kernel in compiled(width, options):
            masked, whole = kernel.instructions(pairs_of_step(kernel, options, width))
            spread = f"{masked:.1f} | {whole:.1f} | {useful(masked, whole, layout):.1f}"
            place = f"{width}, {name}, {'backward' if kernel.is_backward else 'forward'}"
            print(f"{place} | {kernel.registers} | {kernel.spills} | {kernel.resident_warps} | {spread}", flush=True)
    os._exit(0)  # the threads of the pretended device cannot be joined


if __name__ == "__main__":
    main(sys.argv[1:])
