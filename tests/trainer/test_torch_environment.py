"""The trainer sets torch's allocator and compiler before CUDA starts, unless the user has set them."""

from __future__ import annotations

import os

import pytest

from services.core import machine
from trainer import __main__ as program
from trainer.__main__ import set_allocator, set_compiler

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({NAMES[0]: "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({NAMES[1]: "max_split_size_mb:64"}, None),
    ],
    ids=["unset", "new name", "former name"],
)
def test_segments_are_expandable_unless_the_user_chose(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str | None
) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    set_allocator()
    assert os.environ.get(NAMES[0]) == expected


def test_the_engines_of_a_colocated_node_do_not_get_the_ranks_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str | None] = []
    monkeypatch.setattr(os, "environ", {"COLOCATE": "true", "ENGINE_SLEEPS": "true", "PATH": os.environ["PATH"]})
    monkeypatch.setattr(program, "kill_stale_processes", lambda: None)
    monkeypatch.setattr(
        program, "launch_ranks", lambda count, beside: started.append(beside[0].variables().get(NAMES[0])) or 0
    )
    assert program.main() == 0
    assert started == [None]


COMPILERS = "TORCHINDUCTOR_COMPILE_THREADS"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({machine.PROMISED_GPUS_VARIABLE: "8", machine.CORES_VARIABLE: "32.0"}, "4"),
        ({machine.PROMISED_GPUS_VARIABLE: "8", machine.CORES_VARIABLE: "4.0"}, "1"),
        ({machine.PROMISED_GPUS_VARIABLE: "8", machine.CORES_VARIABLE: "32.0", COMPILERS: "2"}, "2"),
    ],
    ids=["a share of the pod's cores", "at least one", "the user's"],
)
def test_the_compilers_of_all_ranks_share_the_cores_of_the_pod(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str
) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(192)), raising=False)
    set_compiler()
    assert os.environ[COMPILERS] == expected
