"""The preflight's bytes of a process without a GPU are its resident memory, within a fifth."""

from __future__ import annotations

import pytest

from benchmarks.job import ROOT
from benchmarks.update import Work, run
from trainer.capacity.need import PROCESSOR_PROCESS_BYTES, needed
from trainer.capacity.shape import ModelShape
from trainer.capacity.work import Limits, Machine, work_of
from trainer.config import TrainerSettings
from trainer.model.loading import load_config


@pytest.mark.slow
def test_a_trainer_of_135_million_parameters_takes_the_memory_that_the_preflight_says() -> None:
    model = ROOT / ".cache/models/smollm2-135m"
    if not model.is_dir():
        pytest.skip(f"needs {model}, which `make demo` makes")
    tokens = 32
    (measured,) = run(Work(str(model), 1, 8, 100, tokens, rounds=1), 1, 1)
    settings = TrainerSettings.load(model_name=str(model), micro_batch_tokens=100 + 8 * (tokens - 1))
    shape = ModelShape.of(load_config(settings))
    work = work_of(settings, shape, Machine(1, 1, 4, Limits(0, 0, 0, 0)))
    exact = {**vars(work), "tokens": 100 + 8 * (tokens - 1)}
    expected = needed(shape, type(work)(**exact)).total("device") + PROCESSOR_PROCESS_BYTES
    assert measured.peak_bytes == pytest.approx(expected, rel=0.2)
    assert measured.peak_bytes < expected * 1.02
