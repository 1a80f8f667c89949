"""Several sources in a run: the trainer's settings."""

import pytest

from services.core.endpoints import Task
from services.core.errors import ConfigurationError
from trainer.config import TrainerSettings

MIX = """
- name: sums
  ratio: 2
  max_new_tokens: 8
- name: tools
  rollout: agent
  agent: evaluation.multiplying_agent:solve
  group_size: 4
  agent_max_tokens: 700
- name: guessing
  rollout: environment
  dataset: seeds
"""


@pytest.fixture
def mix(tmp_path):
    path = tmp_path / "mix.yaml"

    def load(text=MIX, **settings):
        path.write_text(text)
        return TrainerSettings.load(sources=path, **{"max_steps": 5, **settings})

    return load


def test_each_source_has_settings_of_its_own_and_the_limits_are_over_all(mix):
    settings = mix(group_size=16)
    by_source = settings.by_source()
    assert {name: (s.way.sampler, s.group_size) for name, s in by_source.items()} == {
        "guessing": ("trainer.rollouts.game:Games", 16),
        "sums": ("trainer.rollouts.groups:Completions", 16),
        "tools": ("trainer.rollouts.episodes:Agents", 4),
    }
    assert (settings.longest_answer, settings.largest_group) == (4096, 16)
    assert settings.services == (
        Task.DATA_SERVER,
        Task.REWARD_SERVER,
        Task.REPLAY_BUFFER,
        Task.ROLLOUT_SERVER,
        Task.GATEWAY,
        Task.ENVIRONMENT_SERVER,
    )
    assert settings.own_functions == {"AGENT of tools": "evaluation.multiplying_agent:solve"}
    assert settings.total_steps(train_prompts=1) == 5
    assert settings.schedule.counts(0, 4) == {"guessing": 1, "sums": 2, "tools": 1}


@pytest.mark.parametrize(
    ("text", "settings", "problem"),
    [
        ("- name: a\n", {"max_steps": 0}, "set MAX_STEPS"),
        ("- name: a\n  rollout: agent\n", {}, "source 'a': AGENT is '', but ROLLOUT is agent"),
        ("- name: a\n  group_size: 1\n", {}, "source 'a': GROUP_SIZE is 1, but ADVANTAGE=grpo compares"),
        ("- name: a\n  max_new_tokens: 8\n", {"overlong_buffer": 9}, "source 'a': OVERLONG_BUFFER is 9"),
        (
            "- name: a\n  max_new_tokens: 8\n- name: b\n",
            {"overlong_buffer": 4},
            r"sources have different MAX_NEW_TOKENS \(a 8, b 512\)",
        ),
        ("- name: a\n  loss: gspo\n", {}, "source 1: 'loss' is not a key of a source"),
        ("- name: a\n  opponent: http://a:1\n", {}, "source 'a': OPPONENT is read with ROLLOUT=environment alone"),
        ("- name: a\n  rollout: program\n  agent: ''\n  agent_command: x\n", {"max_steps": 0}, "^MAX_STEPS"),
        ("- name: a\n", {"opponent": "http://a:1"}, "^OPPONENT is read with ROLLOUT=environment alone"),
        ("- name: a\n  temperature: 2\n", {}, "every other variable is the same for all sources"),
    ],
)
def test_what_does_not_fit_a_source_is_refused_with_its_name(mix, text, settings, problem):
    with pytest.raises(ConfigurationError, match=problem):
        mix(text, **settings)
