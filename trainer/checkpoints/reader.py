"""The reader of torch's checkpoints, which runs nothing that is in them.

torch unpickles ``.metadata`` and every entry that is not a tensor. A pickle may call any function that it names, so
whoever writes the volume, or hands on a run, could run code as the trainer.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

_MODULE = "torch.distributed.checkpoint"
_NAMES = {
    *((f"{_MODULE}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((f"{_MODULE}.metadata", f"{kind}StorageMetadata") for kind in ("Bytes", "Chunk", "Tensor")),
    (f"{_MODULE}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_MODULE}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}
"""The modules and names in the metadata that torch writes, types of numbers aside."""


class CheckpointReader(FileSystemReader):
    """A reader whose metadata name nothing but what checkpoints consist of, and tensors wherever a run loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checkpoint's metadata.

        Raises:
            UnpicklingError: the file is not as torch writes it.
        """
        path = self._get_metadata_path(kwargs.get("rank"))
        try:
            with open(path, "rb") as file:
                metadata: Metadata = _Unpickler(file).load()
            # Runs keep the hyperparameters of their settings, and load nothing else that is not a tensor.
            entries = metadata.state_dict_metadata.items()
            others = [name for name, kind in entries if not isinstance(kind, TensorStorageMetadata)]
            if strange := [name for name in others if "optimizer.param_groups." not in name]:
                raise pickle.UnpicklingError(f"{strange[0]} is not a tensor")
            metadata.storage_meta = metadata.storage_meta or StorageMeta()
            metadata.storage_meta.load_id = self.load_id
        # Broken pickles raise errors of many types.
        except Exception as error:
            raise pickle.UnpicklingError(f"{path} is not the metadata of a checkpoint: {error}") from error
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _NAMES or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint has")
