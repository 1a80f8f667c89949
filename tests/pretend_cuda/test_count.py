"""The counted kernels, of which the expectations of docs/gpus.md are made, are those of today's code."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from benchmarks.scaling.roofline import LABELS, Counted
from scripts.launch.models import CONFIGS
from tests.pretend_cuda.count import count

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("label", LABELS)
def test_the_counted_kernels_are_fresh(label: str) -> None:
    command = ".venv-cuda/bin/python -m tests.pretend_cuda -m tests.pretend_cuda.count"
    assert asdict(count(CONFIGS[label][1])) == asdict(Counted.of(label)), f"run `{command}`"
