"""Compile a kernel by SGLang's own build, in an environment with its sources and toolchain, but without torch or a GPU.

``python compile_kernels.py KERNEL CAPABILITY DIRECTORY``. Modules of SGLang that the build only imports are empty here.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

PACKAGES = ("", "kernels", "kernels.jit", "kernels.jit.utils", "srt", "srt.utils")


class Torch(ModuleType):
    """A module in which every name is a type, as of torch."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (), {}))
        return getattr(self, name)


def stand_in() -> None:
    """Put modules in place of torch and of the packages of SGLang, whose own imports need the whole engine."""
    torch: Any = Torch("torch")
    torch.compiler = SimpleNamespace(disable=lambda function: function)
    torch.version = SimpleNamespace(cuda="13.0", hip=None)
    torch.cuda = SimpleNamespace(is_available=lambda: False)
    sys.modules["torch"] = torch
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    for package in PACKAGES:
        name, directory = f"sglang.{package}".rstrip("."), Path(spec.origin).parent.joinpath(*package.split("."))
        module = ModuleType(name)
        module.__path__ = [str(directory)]
        module.__spec__ = ModuleSpec(name, None, origin=str(directory / "__init__.py"))
        sys.modules[name] = module
    common: Any = ModuleType("sglang.srt.utils.common")
    common.is_cuda = lambda: True
    sys.modules["sglang.srt.utils.common"] = common


def main(name: str, capability: str, directory: Path) -> None:
    """Compile ``activation``, which every model runs, ``metadata``, which includes CUB, or ``cuda_ipc``, which links
    the driver."""
    stand_in()
    from sglang.kernels.jit.utils import arch
    from sglang.kernels.jit.utils.compile import ninja, paths, toolchain
    from sglang.kernels.jit.utils.compile.spec import BuildSpec, resolve_sources

    major, minor = map(int, capability.split("."))
    arch._CUDA_ARCH, arch._init_jit_cuda_arch_once = arch.make_jit_cuda_arch(major, minor), lambda: None
    act = f"ActivationKernel<bf16_t, {'true' if major >= 9 else 'false'}>::run_activation"
    kernels = {
        "activation": ("elementwise/activation.cuh", act, ()),
        "metadata": ("deepseek_v4/paged_mqa_metadata.cuh", "IndexerMetadataKernel::run", ()),
        "cuda_ipc": ("distributed/ipc.cuh", "register_ipc_manager", (f"-L{toolchain.cuda_stubs_dir()}", "-lcuda")),
    }
    file, function, libraries = kernels[name]
    spec = BuildSpec(
        module_args=(name,),
        cpp_files=(),
        cuda_files=resolve_sources([file]),
        cpp_wrappers=(),
        cuda_wrappers=(("run", function),),
        cflags=tuple(paths.DEFAULT_CFLAGS),
        cuda_cflags=(*arch.get_default_target_flags(), "--use_fast_math"),
        ldflags=libraries,
        include_paths=tuple(paths.DEFAULT_INCLUDE),
        header_only=True,
    )
    print(ninja.build(spec=spec, build_dir=directory, build_file=ninja.generate(spec)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
