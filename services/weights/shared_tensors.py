"""The pickle, in base64, that tells an engine where weights are in the memory of a GPU that it shares with the trainer.

The pickle is that of SGLang's ``/update_weights_from_tensor`` with ``load_format="flattened_bucket"``: a dictionary of
``flattened_tensor``, the bytes of several tensors one after the other as a handle of CUDA IPC, and ``metadata``, their
names, types and places.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

DTYPES = ("float32", "bfloat16", "float16", "uint8")
DEVICE = 6
"""The place of the device among the arguments of torch's ``rebuild_cuda_tensor``."""


class BucketError(Exception):
    """A bucket that cannot be read: damaged, or of another GPU."""


def pack_bucket(flat: Tensor, tensors: Mapping[str, Tensor]) -> str:
    """Return the pickle of a bucket, in base64.

    Args:
        flat: the tensors' bytes, one after the other, on a GPU.
        tensors: the tensors by name, in the order of their bytes.
    """
    metadata, start = [], 0
    for name, value in tensors.items():
        place = {"start_idx": start, "end_idx": start + value.nbytes, "numel": value.nbytes}
        # SGLang reads the attributes of whatever class.
        metadata.append(SimpleNamespace(name=name, shape=value.shape, dtype=value.dtype, **place))
        start += value.nbytes
    packed = io.BytesIO()
    _Pickler(packed).dump({"flattened_tensor": flat, "metadata": metadata})
    return base64.b64encode(packed.getvalue()).decode()


def unpack_bucket(text: str) -> dict[str, Tensor]:
    """Return the tensors of a pickled bucket, in the memory of the trainer; nothing of it is ever executed.

    Raises:
        BucketError: the text is something else, or its memory is not there.
    """
    try:
        content = _Unpickler(io.BytesIO(base64.b64decode(text, validate=True))).load()
        flat: Tensor = content["flattened_tensor"]
        return {m.name: flat[m.start_idx : m.end_idx].view(m.dtype).view(m.shape) for m in content["metadata"]}
    # Broken pickles raise errors of many types.
    except Exception as error:
        raise BucketError(f"the bucket cannot be read: {error or repr(error)}") from error


def _gpu_uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _open_handle(*arguments: Any) -> Tensor:
    """Return the tensor of a handle from another process on the same GPU."""
    device = next(i for i in range(torch.cuda.device_count()) if _gpu_uuid(i) == arguments[DEVICE])
    rebuild: Callable[..., Tensor] = reductions.rebuild_cuda_tensor
    return rebuild(*arguments[:DEVICE], device, *arguments[DEVICE + 1 :])


_ALLOWED: dict[tuple[str, str], Any] = {
    ("types", "SimpleNamespace"): SimpleNamespace,
    ("torch", "Tensor"): Tensor,
    ("torch", "Size"): torch.Size,
    ("torch.storage", "TypedStorage"): torch.storage.TypedStorage,
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"): _open_handle,
    **{("torch", name): getattr(torch, name) for name in DTYPES},
}


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(value)
        # By its UUID, as SGLang has it, because the engine may see the GPU under another number.
        return rebuild, (*arguments[:DEVICE], _gpu_uuid(arguments[DEVICE]), *arguments[DEVICE + 1 :])


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return _ALLOWED[module, name]
