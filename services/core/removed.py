"""The variables that components used to read, each with what does its work now."""

from __future__ import annotations

from collections.abc import Iterable

REMOVED: dict[str, str] = {
    "ARITHMETIC_DIGITS": 'set DATASET_CONFIG={"digits": [1, 2]}',
    "ARITHMETIC_OPERATIONS": 'set DATASET_CONFIG={"operations": "+-"}',
    "ARITHMETIC_TEMPLATE": 'set DATASET_CONFIG={"template": "{a}{op}{b}="}',
    "ENGINE_HANG_SECONDS": "engines and routers that do not answer for 60 s are restarted",
    "ENGINE_STALE_SECONDS": "SERVICE_DEADLINE_SECONDS decides it: a fifth of that",
    "ENVIRONMENT_TEXT_TURNS": "set ENVIRONMENT_MAX_STEPS, which bounds the answers of a text environment too",
    "EVAL_SESSION_QUESTIONS": "an agent answers each question in a conversation of its own",
    "GAE_PER_TURN": "set CREDIT=turn, with which a step of GAMMA and GAE_LAMBDA is a turn",
    "HEAD_LLM_TEMPERATURE": "the head asks for the likeliest token each time",
    "JUDGE_MAX_TOKENS": 'set JUDGE_ARGS={"max_tokens": 2048}',
    "JUDGE_SECONDS": "SERVICE_DEADLINE_SECONDS decides it: 0.4 of that",
    "JUDGE_SECOND_ORDER": "judge_group asks once for each group, in an order that it draws",
    "PUBLISH_DELTA": "every version has all weights; PUBLISH_TRANSPORT=broadcast sends them past a slow volume, and "
    "LORA_RANK makes versions small",
    "PUBLISH_PROBE": "every publication is proven: by digests of weights, and by log-probabilities of a fixed text",
    "REPLAY_CAPACITY": "the replay-buffer keeps 100,000 groups, of which REPLAY_MAX_STALENESS bounds the age",
    "REPLAY_CORRECTION": "prioritised replay has the beta of its paper, 0.4",
    "REPLAY_EXPONENT": "replayed groups are drawn in proportion to their priorities",
    "REPLAY_FSYNC": "the replay-buffer keeps acknowledged groups through a loss of power",
    "REPLAY_MAX_GB": "the groups may take 64 GB; REPLAY_DIR names a disk with as much room",
    "REWARD_MODEL_MAX_TOKENS": "the positions of REWARD_MODEL decide it, and 32,768 tokens",
    "REWARD_QUEUE_SECONDS": "SERVICE_DEADLINE_SECONDS decides it: a fifteenth of that",
    "ROLLOUT_LOST_SECONDS": "SERVICE_DEADLINE_SECONDS decides it: twice that",
    "SAVE_TYPE": "PUBLISH_TYPE is that of the trained model, too, which is the last published version",
    "SANDBOX_SESSION_SECONDS": "an episode's programs have 60 s of processor time, and CODE_CPU_SECONDS bounds each",
}
"""The words that say what does the work of a removed variable, by its name."""


def removed_among(names: Iterable[str]) -> list[str]:
    """Return a sentence for each of the ``names`` that is a removed variable, in upper or lower case."""
    return [f"{name} is no setting any more; {REMOVED[name.upper()]}" for name in names if name.upper() in REMOVED]
