"""A loss and a dataset that are added in the places that CONTRIBUTING.md names are ones."""

from __future__ import annotations

import pytest

from services.data_server import dataset_rows, generators, settings
from services.data_server.settings import DataSettings
from trainer.algorithm import methods, policy_losses
from trainer.config import TrainerSettings
from trainer.config.objective import Objective


def test_a_loss_that_is_added_in_its_two_places_is_one(monkeypatch):
    monkeypatch.setitem(policy_losses.LOSS_FUNCTIONS, "halved", policy_losses.clipped)
    with pytest.raises(ValueError, match="LOSS is 'halved'"):
        TrainerSettings(loss="halved")
    monkeypatch.setitem(methods.LOSSES, "halved", methods.LOSSES["clipped"])
    assert Objective(TrainerSettings(loss="halved", clip_low=0.1)) is not None


def test_a_dataset_that_is_added_in_its_two_places_is_one(monkeypatch):
    given = DataSettings(dataset="arithmetic", dataset_held_out="0.5")
    monkeypatch.setattr(settings, "GENERATORS", (*settings.GENERATORS, "sums"))
    monkeypatch.setitem(generators.TABLES, "sums", generators.TABLES["arithmetic"])
    added = dataset_rows.load(given.model_copy(update={"dataset": "sums"}))
    assert added.name == "sums"
    assert len(added.train) == len(dataset_rows.load(given).train) > 0
