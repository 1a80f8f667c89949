"""Stands in for SGLang's package of CUDA kernels: whatever is looked up is a function that raises when it is called.

So a path that would need a kernel ends in an error, never in a wrong result.
"""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

__version__ = "0.4.10"

# Those which SGLang imports without asking whether they are there; to be told of others' absence it is prepared.
SUBMODULES = frozenset(
    [
        "allreduce",
        "attention",
        "cutlass_moe",
        "elementwise",
        "flash_attn",
        "gemm",
        "grammar",
        "kvcacheio",
        "mamba",
        "memory",
        "moe",
        "quantization",
        "sampling",
        "sparse_flash_attn",
        "spatial",
        "speculative",
        "top_k",
        "utils",
    ]
)
__path__: list[str] = []  # a package, so that its submodules are looked for


def _kernel(name: str) -> Any:
    def missing(*_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(f"{name} needs the CUDA kernels of SGLang")

    return missing


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _kernel(f"{__name__}.{name}")


class _Submodule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _kernel(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the submodules."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        package, _, submodule = name.partition(".")
        found = package == __name__ and submodule in SUBMODULES
        return importlib.machinery.ModuleSpec(name, self) if found else None

    def create_module(self, spec: Any) -> ModuleType:
        return _Submodule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


sys.meta_path.append(_Finder())
