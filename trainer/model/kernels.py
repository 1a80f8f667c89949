"""Compiled kernels in a file beside the checkpoints: a trainer that starts on a new pod need not compile for minutes.

torch keeps kernels in /tmp, by their code, its options and the versions of what compiles them. Rank 0 writes those of
its first update into one file. Every rank fills its own /tmp from it before it compiles.
"""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from services.core.files import atomic_write
from services.core.logs import get_logger
from trainer.config import TrainerSettings

log = get_logger(__name__)

SIGNATURE_BYTES = 32


@dataclass(frozen=True)
class KeptKernels:
    """The file for one version of torch and one kind of GPU.

    It has code and pickles, so it begins with its HMAC by JOBGROUP_TOKEN, without which whoever writes the volume could
    run code as the trainer. A damaged file, and one that was written with another token, are not used.
    """

    file: Path
    token: str

    @classmethod
    def of(cls, settings: TrainerSettings, device: torch.device) -> Self | None:
        """Return the kernels of a run for this process's torch and GPU; None without a GPU or a JOBGROUP_TOKEN."""
        if device.type != "cuda" or settings.token is None:
            return None
        name = f"kernels-{torch.__version__}-{torch.cuda.get_device_name(device)}"
        return cls(settings.checkpoint_dir / re.sub(r"[^\w.+-]", "-", name), settings.token)

    def load(self) -> None:
        """Fill torch's cache from the file, if there is one; warn if it cannot be used, because torch then compiles."""
        try:
            whole = self.file.read_bytes()
            signature, content = whole[:SIGNATURE_BYTES], whole[SIGNATURE_BYTES:]
            if not hmac.compare_digest(signature, self._signature(content)):
                raise ValueError("it is damaged, or was written with another JOBGROUP_TOKEN")
            if torch.compiler.load_cache_artifacts(content) is None:
                raise ValueError("torch cannot read it")
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            log.warning("kept kernels not used; they are compiled again", file=str(self.file), reason=str(error))
        else:
            log.info("kernels loaded", file=str(self.file), megabytes=round(len(content) / 1e6, 1))

    def keep(self) -> None:
        """Write all kernels that this process has compiled or loaded; warn if they cannot be written."""
        made = torch.compiler.save_cache_artifacts()
        if made is None:
            return
        try:
            atomic_write(self.file, self._signature(made[0]) + made[0])
        except OSError as error:
            log.warning("kernels not kept; a restart compiles them again", file=str(self.file), reason=str(error))

    def _signature(self, content: bytes) -> bytes:
        return hmac.digest(self.token.encode(), content, "sha256")
