"""Run Python on a pretended H100: ``.venv-cuda/bin/python -m tests.pretend_cuda ARGUMENTS...``.

The arguments are those of Python: ``-m pytest tests/pretend_cuda -m cuda``, or a script. Needs a CUDA build of torch in
the environment, and gcc. Two small libraries take the place of CUDA's runtime (loaded first, by LD_PRELOAD) and driver
(found first, by LD_LIBRARY_PATH); torch then reports one device, ``cuda:0``, of compute capability 9.0.

Within FakeTensorMode every operation on this device has shapes, types and devices, and no values:

- code takes the branches that it takes on an H100, and autograd records the kernels that would run;
- a TorchDispatchMode sees each operation with its shapes (tests/pretend_cuda/seen.py), FSDP's collectives included if
  the process group is ``fake`` (torch.testing._internal.distributed.fake_pg);
- where the host would wait for a value (``.item()``, ``.tolist()``), FakeTensorMode raises an error.

It shows nothing about values, time, NCCL, or whether a kernel launches. The threads of such a process cannot be joined,
so conftest.py ends pytest by os._exit, and a script must do so itself.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.pretend_cuda.build import build

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Build the libraries and become Python with the given arguments, on the pretended device."""
    libraries = build(ROOT / ".cache" / "pretend_cuda")
    paths = [str(libraries), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    device = {"LD_PRELOAD": str(libraries / "runtime.so"), "LD_LIBRARY_PATH": ":".join(paths)}
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], {**os.environ, **device})


if __name__ == "__main__":
    main()
