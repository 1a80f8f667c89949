"""Profiles of steps: the files are there, and show the phases and groups of the steps that were asked for."""

from __future__ import annotations

import gzip
import time
from pathlib import Path

import orjson
import torch

from services.core.errors import DependencyLostError
from services.core.tasks import TIMELINE
from trainer.config import TrainerSettings
from trainer.reporting.profiles import StepProfile
from trainer.reporting.step_metrics import StepClock


def test_the_steps_of_the_range_are_recorded_and_no_others(tmp_path: Path) -> None:
    settings = TrainerSettings.load(shared_dir=tmp_path, run_id="r", profile_steps="2:3")
    asked, clock = list[str](), StepClock()
    profile = StepProfile(settings, torch.device("cpu"), lambda what, _: asked.append(what))
    for step in range(1, 5):
        profile.begin(step)
        clock.enter("generate")
        began = time.perf_counter()
        torch.ones(8, 8) @ torch.ones(8, 8)
        TIMELINE.add(f"group 0-{step}", "generate", began, time.perf_counter())
        clock.enter("train")
        profile.end(step)
    directory = settings.run_dir / "profile" / "from-step-2"
    assert asked == ["record a profile", "write its profile"]
    events = orjson.loads((directory / "timeline.json").read_bytes())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [(tracks[event["tid"]], event["name"]) for event in events if event["ph"] == "X"]
    assert {track for track, _ in spans} == {"phases", "group 0-2", "group 0-3"}
    assert {name for track, name in spans if track == "phases"} == {"train", "generate"}
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in events if event["ph"] == "X")
    trace = orjson.loads(gzip.decompress((directory / "trace.json.gz").read_bytes()))
    assert [event["name"] for event in trace["traceEvents"]].count("aten::mm") == 2
    assert [path.name for path in directory.parent.iterdir()] == ["from-step-2"]


def test_a_run_that_ends_within_the_range_and_has_lost_its_engines_has_what_was_recorded(tmp_path: Path) -> None:
    settings = TrainerSettings.load(shared_dir=tmp_path, run_id="r", profile_steps="2:9")

    def lost(*_: object) -> None:
        raise DependencyLostError("the router does not answer")

    profile = StepProfile(settings, torch.device("cpu"), lost)
    profile.begin(2)
    profile.end(2)
    profile.close()
    assert (settings.run_dir / "profile" / "from-step-2" / "timeline.json").exists()
