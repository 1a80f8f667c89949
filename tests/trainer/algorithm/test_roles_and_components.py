"""ADVANTAGE=rae and gdpo on groups: the order of prompts, seats and sources, components, and what has a signal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from services.core.errors import ConfigurationError
from services.protocol.groups import Group, TokenSequence
from services.protocol.rewards import RewardResult, RewardStatus
from tests.sequences import make_group, trained_sequence
from tests.trainer.tiny import has_signal
from trainer.algorithm.packing import TrainingGroup
from trainer.config import TrainerSettings
from trainer.config.objective import Objective


def game(position: int, *played: tuple[int | None, float | None], source: str = "") -> Group:
    """Return a prompt's group with a sequence of each (seat, reward); without a reward it failed."""
    sequences = [
        trained_sequence([5], [-1.0], seat=seat, episode=number).model_copy(
            update={"result": RewardResult(reward=reward, status="scored" if reward is not None else "error")}
        )
        for number, (seat, reward) in enumerate(played)
    ]
    return make_group(group_id=f"g{position}", position=position, source=source, sequences=sequences)


def computed(objective: Objective, *groups: Group, replayed: int | None = None) -> list[list[float]]:
    trained = [objective.training_group(g, is_replayed=n == replayed) for n, g in enumerate(groups)]
    return [[float(s.advantages[0]) for s in g.sequences] for g in objective.with_advantages(trained)]


def rae_objective(**baselines: dict[int, float]) -> Objective:
    return Objective(TrainerSettings.load(advantage="rae", rollout="environment"), baselines)


def test_baselines_move_in_the_order_of_prompts_whenever_their_groups_arrived() -> None:
    groups = [game(0, (0, 1.0), (1, -1.0)), game(1, (0, None), (1, 0.5)), game(2, (0, 0.0), (1, 1.0))]
    in_order, late = rae_objective(), rae_objective()
    expected = computed(in_order, *groups)
    assert expected == [[1.0, -1.0], [0.5 + 0.05], pytest.approx([-0.05, 1 - (0.95 * -0.05 + 0.025)])]
    found = computed(late, groups[2], groups[0], groups[1])
    assert found == [expected[2], expected[0], expected[1]]
    assert (
        late.role_baselines == in_order.role_baselines == {"": {0: pytest.approx(0.0475), 1: pytest.approx(0.028625)}}
    )
    assert late.metrics == pytest.approx({"role_baseline_seat_0": 0.0475, "role_baseline_seat_1": 0.028625})


def test_a_replayed_group_reads_the_baselines_after_the_fresh_ones_and_moves_none() -> None:
    objective = rae_objective()
    found = computed(objective, game(0, (0, 5.0)), game(7, (0, 1.0)), replayed=0)
    assert found == [[5 - 0.05], [1.0]]
    assert objective.role_baselines == {"": {0: pytest.approx(0.05)}}


def test_each_source_has_baselines_of_its_own_and_a_completion_one_role(tmp_path: Any) -> None:
    sources = tmp_path / "sources.yaml"
    sources.write_text("- {name: a, ratio: 1, dataset: arithmetic}\n- {name: b, ratio: 1, dataset: arithmetic}\n")
    settings = TrainerSettings.load(advantage="rae", sources=sources, max_steps=2)
    objective = Objective(settings, {"b": {-1: 0.5}})
    found = computed(objective, game(0, (None, 1.0), source="a"), game(1, (None, 1.0), source="b"))
    assert found == [[1.0], [0.5]]
    assert objective.metrics == {"role_baseline_b": 0.525, "role_baseline_a": pytest.approx(0.05)}


def scored(reward: float, status: str = "scored", **components: float | None) -> TokenSequence:
    result = RewardResult(reward=reward, status=RewardStatus(status), components=components)
    return trained_sequence([5], [-1.0]).model_copy(update={"result": result})


def gdpo_of(*sequences: TokenSequence, **settings: Any) -> list[float]:
    chosen = TrainerSettings.load(advantage="gdpo", **settings)
    [group] = Objective(chosen).with_advantages([TrainingGroup([1], list(sequences))])
    return [float(s.advantages[0]) for s in group.sequences]


def test_components_come_from_the_rewards_by_name_with_their_weights() -> None:
    answers = (scored(9, a=1, b=0), scored(9, a=0, b=2), scored(9, a=0, b=None), scored(9, a=1, b=0))
    whole = gdpo_of(*answers)
    assert whole != pytest.approx(gdpo_of(*answers, gdpo_weights="a=1,b=0.2"))
    by_a = gdpo_of(*answers, gdpo_weights="a=3")
    assert by_a == pytest.approx(gdpo_of(*(scored(0, a=x) for x in (1, 0, 0, 1))))
    assert by_a == pytest.approx(gdpo_of(*(scored(x) for x in (1, 0, 0, 1)))), "a reward without components is one"
    with pytest.raises(ConfigurationError, match=r"ADVANTAGE=gdpo .*: no reward has the component 'c'; there are a, b"):
        gdpo_of(*answers, gdpo_weights="a=1,c=1")


@pytest.mark.parametrize(("over_limit", "expected"), [(0.0, 0.0), (-2.0, -2.0), (5.0, 0.5)])
def test_an_answer_over_a_limit_is_the_worst_in_every_component(over_limit: float, expected: float) -> None:
    over = scored(0, "over_limit", a=None)
    found = gdpo_of(scored(1, a=1, b=0.5), scored(1, a=0.5, b=1), over, over_limit_reward=over_limit)
    wanted = gdpo_of(scored(1, a=1, b=0.5), scored(1, a=0.5, b=1), scored(0, a=expected, b=expected))
    assert found == pytest.approx(wanted)
    assert gdpo_of(over, over, over_limit_reward=over_limit) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("answers", "weights", "expected"),
    [
        ((scored(2, a=0, b=1, c=2), scored(2, a=1, b=1, c=1), scored(2, a=2, b=0, c=1)), None, True),
        ((scored(2, a=0, b=2), scored(2, a=2, b=0)), "a=1,b=0.5", True),
        ((scored(1, a=1, b=0), scored(2, a=1, b=1)), "a=1", False),
        ((scored(1, a=1, b=0), scored(2, a=1, b=1)), "a=1,b=0", False),
        ((scored(1, a=1, b=0), scored(2, a=1, b=1)), "a=1,b=-0.5", True),
        ((scored(1, a=1, b=None), scored(2, a=1, b=1)), None, False),
        ((scored(1, a=1), scored(1, "over_limit", a=None)), None, True),
        ((scored(1, a=0), scored(1, "over_limit", a=None)), None, False),
    ],
)
def test_a_group_has_a_signal_where_a_component_with_weight_differs(
    answers: tuple[TokenSequence, ...], weights: str | None, expected: bool
) -> None:
    settings = TrainerSettings.load(advantage="gdpo", gdpo_weights=weights)
    assert has_signal(make_group(sequences=answers), settings) is expected
    assert np.any(gdpo_of(*answers, gdpo_weights=weights)) == expected


def test_the_over_limit_reward_decides_whether_a_group_has_a_signal() -> None:
    made = make_group(sequences=[scored(1, a=0), scored(1, "over_limit")])
    assert has_signal(made, TrainerSettings.load(advantage="gdpo", over_limit_reward=-1))
    assert not has_signal(made, TrainerSettings.load(advantage="gdpo"))


def test_a_group_always_teaches_where_a_role_is_its_baseline() -> None:
    assert has_signal(game(0, (0, 1.0)), TrainerSettings.load(advantage="rae", rollout="environment"))
    masked = make_group(sequences=[trained_sequence([1], [0.0], loss_mask=[False])])
    assert not has_signal(masked, TrainerSettings.load(advantage="reinforce"))
