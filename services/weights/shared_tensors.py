"""Weights in memory that trainer and engine of one host share, and the pickle that tells the engine where they are.

The pickle is that of SGLang's ``/update_weights_from_tensor`` with ``load_format="flattened_bucket"``: a dictionary of
``flattened_tensor``, the bytes of several tensors one after the other, and ``metadata``, their names, types and places.
On a GPU ``flattened_tensor`` is a handle of CUDA IPC. Between processors, it names a part of a file in memory: torch's
own handles would need a daemon, and a process that dies would leave its memory to it.

The file begins with the version that it holds, and with -1 while the trainer writes. An engine compares the number with
the version that it was sent when it has copied the weights, so that it never serves a half-written version.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import secrets
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from services.core.machine import memory_directory

HEADER = 64
"""Bytes before the tensors, of which the first 8 are the version; a multiple of every type's size."""
UNFINISHED = -1
"""The version of a file that is being written."""
DTYPES = ("float32", "bfloat16", "float16", "uint8")


class BucketError(Exception):
    """A bucket that cannot be read: damaged, written over, or in the memory of another host."""


@dataclass(frozen=True)
class FilePart:
    """The tensors of one version in a file of ``memory_directory``."""

    file: str
    version: int
    size: int
    """Bytes of the tensors, which follow the header."""


class SharedMemory:
    """A file in memory for one version at a time. Later versions are copied into the same pages, four times as fast."""

    def __init__(self, path: Path, size: int) -> None:
        """Make the file, in place of that of a trainer that died.

        Args:
            path: the file, in ``memory_directory``.
            size: bytes of a version.

        Raises:
            OSError: there is no room.
        """
        self.path = path
        try:
            self.path.unlink(missing_ok=True)
        except OSError:  # a directory, or a file of another user, who can know the name
            self.path = path.with_name(f"{path.name}-{secrets.token_hex(8)}")
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(file, HEADER + size)
            if hasattr(os, "posix_fallocate"):  # else the first write to a page without room would kill the process
                os.posix_fallocate(file, 0, HEADER + size)
            self._memory = mmap.mmap(file, HEADER + size)
        except OSError:
            self.path.unlink()
            raise
        finally:
            os.close(file)
        self._version = torch.frombuffer(self._memory, dtype=torch.int64, count=1)
        self._used = HEADER

    def begin(self) -> None:
        """Declare the version in the file unfinished, and write the next one over it."""
        self._version.fill_(UNFINISHED)
        self._used = HEADER

    def copy_of(self, value: Tensor) -> Tensor:
        """Return a copy of a tensor behind the one before, with a storage of its own; see ``PinnedMemory``."""
        copied = torch.frombuffer(self._memory, dtype=value.dtype, count=value.numel(), offset=self._used)
        self._used += value.nbytes
        return copied.view(value.shape).copy_(value)

    def finish(self, version: int) -> FilePart:
        """Declare the file complete as ``version``."""
        self._version.fill_(version)
        return FilePart(self.path.name, version, self._used - HEADER)

    def remove(self) -> None:
        """Remove the file; who has mapped it keeps its memory."""
        self.path.unlink(missing_ok=True)


def pack_bucket(flat: Tensor | FilePart, tensors: Mapping[str, Tensor]) -> bytes:
    """Return the pickle of a bucket.

    Args:
        flat: the tensors' bytes, one after the other.
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
    return packed.getvalue()


@dataclass(frozen=True)
class Bucket:
    """The tensors of a bucket, in the memory that they were sent in."""

    tensors: dict[str, Tensor]
    is_intact: Callable[[], bool]
    """Returns whether the tensors are still those that were sent."""


def unpack_bucket(data: bytes) -> Bucket:
    """Return a pickled bucket; nothing of it is ever executed.

    Raises:
        BucketError: the data are something else, or its memory is not there.
    """
    try:
        unpickler = _Unpickler(io.BytesIO(data))
        content = unpickler.load()
        flat: Tensor = content["flattened_tensor"]
        tensors = {m.name: flat[m.start_idx : m.end_idx].view(m.dtype).view(m.shape) for m in content["metadata"]}
    # Broken pickles raise errors of many types.
    except Exception as error:
        raise BucketError(f"the bucket cannot be read: {error or repr(error)}") from error
    return Bucket(tensors, unpickler.is_intact)


DEVICE = 6
"""The place of the device among the arguments of torch's ``rebuild_cuda_tensor``."""


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

    def persistent_id(self, value: Any) -> Any:
        return astuple(value) if isinstance(value, FilePart) else None


class _Unpickler(pickle.Unpickler):
    file: io.FileIO | None = None
    version = UNFINISHED

    def persistent_load(self, identity: Any) -> Tensor:
        part = FilePart(*identity)
        if Path(part.file).name != part.file:
            raise BucketError(f"{part.file!r} is not the name of a file")
        path = memory_directory() / part.file
        try:
            self.file, self.version = io.FileIO(path), part.version
        except FileNotFoundError as error:
            raise BucketError(f"{path} does not exist; do trainer and engine run on the same host?") from error
        if not self.is_intact():
            raise BucketError(f"{path} does not hold policy version {part.version}")
        # Private, so that nothing here can change the trainer's tensors.
        memory = mmap.mmap(self.file.fileno(), HEADER + part.size, access=mmap.ACCESS_COPY)
        return torch.frombuffer(memory, dtype=torch.uint8, count=part.size, offset=HEADER)

    def is_intact(self) -> bool:
        if self.file is None:
            return True
        return int.from_bytes(os.pread(self.file.fileno(), 8, 0), "little", signed=True) == self.version

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return _ALLOWED[module, name]
