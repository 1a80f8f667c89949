"""Plans follow from memory and time, say what jobgroup.yaml has, and are what docs/scaling.md shows."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from benchmarks.scaling.__main__ import DOCS, fitted, run, with_output
from benchmarks.scaling.plan import MODELS, Launch, cheapest, layouts, predict, variables
from scripts.launch.models import MEMORY
from scripts.launch.prediction import Batch, busy, trainer_work
from scripts.launch.sizes import GPU, Layout, changes
from trainer.config import TrainerSettings
from trainer.preflight.sizes import needed

pytestmark = pytest.mark.leaving

ROOT = Path(__file__).parents[3]
BATCH = Batch()


@pytest.fixture(scope="module")
def rates():
    return fitted()


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.label)
def test_every_layout_has_the_memory(model):
    for layout in layouts(model, BATCH):
        needs = needed(model.shape, trainer_work(model, BATCH, layout.trainer_nodes, layout.trainer_gpus))
        assert needs.total("device") <= MEMORY[GPU]
        assert model.parameters * 2 < layout.rollout_gpus * MEMORY[GPU]


@pytest.mark.parametrize("label", MODELS)
def test_the_cheapest_is_quick_enough_and_nothing_smaller_is(rates, label):
    model = MODELS[label]
    chosen = cheapest(model, BATCH, rates, 120)
    assert chosen.seconds.total <= 120
    smaller = [layout for layout in layouts(model, BATCH) if layout.gpus < chosen.layout.gpus]
    assert all(predict(model, BATCH, layout, rates).seconds.total > 120 for layout in smaller)


def test_a_step_that_no_layout_makes_is_refused(rates):
    with pytest.raises(ValueError, match="the fastest step takes"):
        cheapest(MODELS["70B"], BATCH, rates, 1)
    with pytest.raises(SystemExit, match="the fastest step takes"):
        run(["plan", "--step-seconds", "1"])


@pytest.mark.parametrize("label", MODELS)
def test_more_nodes_are_never_slower_at_what_they_do(rates, label):
    model = MODELS[label]
    start = next(layouts(model, BATCH))
    base = predict(model, BATCH, start, rates).seconds
    rollouts = predict(model, BATCH, replace(start, rollout_nodes=start.rollout_nodes + 1), rates).seconds
    assert rollouts.generate < base.generate
    assert rollouts.train == base.train
    # A second node adds traffic between nodes; from then on more nodes compute faster, unless the network limits them:
    # on a flat mesh of n nodes a node's traffic is (n - 1) / n of the whole.
    two = predict(model, BATCH, replace(start, trainer_nodes=start.trainer_nodes + 1), rates).seconds
    four = predict(model, BATCH, replace(start, trainer_nodes=start.trainer_nodes + 3), rates).seconds
    n = start.trainer_nodes
    assert four.train <= two.train * max(1.0, 1.001 * (n + 2) / (n + 3) * (n + 1) / n)


def test_async_hides_the_shorter_half(rates):
    one = predict(MODELS["8B"], BATCH, Layout(2, 1, 1, 4), rates)
    seconds = one.seconds
    assert one.asynchronous_seconds == seconds.generate + seconds.score > seconds.learning
    assert seconds.total == pytest.approx(one.asynchronous_seconds + seconds.train + seconds.publish + seconds.rest)


@pytest.mark.parametrize("label", MODELS)
def test_what_is_to_be_changed_is_in_jobgroup_yaml_and_the_settings_exist(rates, label):
    tasks = {document["name"]: document for document in yaml.safe_load_all((ROOT / "jobgroup.yaml").read_text())}
    chosen = cheapest(MODELS[label], BATCH, rates, 120)
    need = needed(MODELS[label].shape, trainer_work(MODELS[label], BATCH, 1, 8))
    for task, key in changes(MODELS[label], chosen.layout, need):
        found = tasks[task]
        for part in key.split("."):
            assert part in found, f"{task}.{key}"
            found = found[part]
    settings = variables(MODELS[label], chosen, BATCH)
    assert {name.lower() for name in settings} <= TrainerSettings.model_fields.keys()


def test_the_preset_of_a_launch_leaves_no_tier_below_60_percent_of_the_slower_one(rates):
    seconds = {(launch.label, launch.options): launch.seconds(rates) for launch in Launch.all()}
    shares = {launch: busy(one.train / one.generate) for launch, one in seconds.items()}
    assert shares.pop(("0.5B", "--stock")) < 0.1
    assert shares.pop(("8B", "--gpus H100:4 --rollout-gpus H100:1 --rollout-nodes 2")) < 0.6, "the page says so"
    assert {label for label, _ in shares} == {"0.5B", "8B"}
    assert min(shares.values()) >= 0.6
    tasks = {document["name"]: document for document in yaml.safe_load_all((ROOT / "jobgroup.yaml").read_text())}
    stock = next(launch.layout for launch in Launch.all() if launch.options == "--stock")
    assert tasks["rollout-server"]["num_nodes"] == stock.rollout_nodes
    assert tasks["ppo-trainer"]["num_nodes"] == stock.trainer_nodes


def test_the_document_shows_what_the_commands_print():
    text = DOCS.read_text()
    assert "$ python -m benchmarks.scaling launches" in text
    assert "$ python -m benchmarks.scaling check" in text
    assert "$ python -m benchmarks.scaling plan" in text
    assert with_output(text) == text, "run `python -m benchmarks.scaling docs`"
