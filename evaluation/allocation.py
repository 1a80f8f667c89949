"""The allocation of an evaluation's engines in the usual shorthand, such as d12p1t2."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from services.core.endpoints import GPUS_OF_A_NODE
from services.core.errors import ConfigurationError

_DIMENSIONS = {"d": "data", "p": "pipeline", "t": "tensor"}


@dataclass(frozen=True)
class Allocation:
    """``data`` engines that share the prompts, each on ``pipeline`` x ``tensor`` GPUs of one node."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of one engine."""
        return self.pipeline * self.tensor

    def __str__(self) -> str:
        return f"d{self.data}p{self.pipeline}t{self.tensor}"

    def sglang_variables(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return the rollout node's variables for engines of this size; ``given`` are the user's."""
        if self.gpus == 1:
            return {}
        flags = f"{given.get('SGLANG_EXTRA_FLAGS', '')} --pp-size {self.pipeline}".strip()
        return {"SGLANG_TP_SIZE": str(self.tensor), "SGLANG_EXTRA_FLAGS": flags}

    def check_cluster(self) -> None:
        """Check that a node of a cluster can hold an engine.

        Raises:
            ConfigurationError: it cannot.
        """
        if self.gpus > GPUS_OF_A_NODE:
            raise ConfigurationError(
                f"--allocation {self}: an engine needs {self.gpus} GPUs of one node, which has at most "
                f"{GPUS_OF_A_NODE}; give smaller p or t"
            )

    def check_machine(self, gpus: int) -> None:
        """Check that this machine can hold all engines. Without GPUs each engine is on the processor.

        Raises:
            ConfigurationError: it cannot.
        """
        if gpus == 0 and self.gpus == 1:
            return
        if self.data * self.gpus > gpus:
            raise ConfigurationError(
                f"--allocation {self} needs {self.data * self.gpus} GPUs, and this machine has {gpus}; give smaller "
                "d, p or t, or CUDA_VISIBLE_DEVICES= for engines on the processor"
            )


def parse_allocation(text: str) -> Allocation:
    """Return the allocation of ``d12p1t2``: letters in any order, each at most once; a letter left out is 1.

    Raises:
        ConfigurationError: ``text`` is no allocation.
    """
    parts = re.findall(r"([dpt])([1-9]\d{0,3})", text)
    letters = [letter for letter, _ in parts]
    if not parts or "".join(letter + number for letter, number in parts) != text or len(set(letters)) < len(letters):
        raise ConfigurationError(
            f"--allocation {text!r} is none; give data, pipeline and tensor parallelism such as d12p1t2"
        )
    return Allocation(**{_DIMENSIONS[letter]: int(number) for letter, number in parts})
