"""The rules that say what is wrong with a run, in one table, RULES.

A rule is a function of the run's ``History``: its rows of metrics.jsonl, whose ``facts`` are sums over groups that
trainer/reporting/group_facts.py has counted. It looks at the newest steps and returns its evidence, or None. Trainer,
terminal, ``grpo status``, ``grpo diagnose``, run page and alerts show what these rules find; docs/guides/diagnosing.md
explains each. Thresholds were chosen on the runs of tests/museum/, healthy ones and others with a known fault.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.run_page.history import WINDOW, History
from services.run_page.progress import OVER_LIMIT, counted

WRONG, DOUBT, NOTE = "wrong", "doubt", "note"
"""The severities: the run computes something else than it should; it may; it does, and that is often intended."""
CERTAIN, LIKELY, POSSIBLE = "certain", "likely", "possible"
"""The degrees of certainty of a cause."""
SAMPLES_PAGE = "Look at the completions and their rewards (Samples on the run page)"

LOST_STEPS, LOST_SHARE, LEAST_BEST = 5, 0.05, 0.1
"""The reward is lost if it was below LOST_SHARE of the best step's, at least LEAST_BEST, in the last LOST_STEPS."""

REMEDIES = {
    "reward_over_limit": "Make the reward function faster or smaller, or raise its limit",
    "limit": "Raise the limit, or end the episode before it: an environment does with truncated=True",
    "timeout": "Raise AGENT_SECONDS, or make the agent faster",
    "exception": "Correct the agent",
    "reward_error": "Correct the reward function",
    "environment": "Correct the environment",
    "refused": "Correct the environment",
    "lost": "See the logs of the environment-servers",
    "server": "See the log of the component that it names",
    "gateway": "See the logs of gateway and rollout-server",
    "opponent": "See why the other seat failed in the log of ppo-trainer",
}
"""The remedy by reason of failure."""


class Evidence(NamedTuple):
    """A finding of a rule: a sentence without its full stop, the newest steps on which it rests, and where to look.

    ``fact`` names the fact whose examples are samples; ``severity`` and ``remedy`` replace the rule's.
    """

    text: str
    steps: int = 1
    fact: str = ""
    severity: str = ""
    remedy: str = ""


Check = Callable[[History], Evidence | None]


# --- weights, tokens, numbers ---


def refused(run: History) -> Evidence | None:
    """Workers confirmed a version and computed with something else."""
    row = run.rows[-1]
    if not (count := row.get("workers_refused")):
        return None
    served, version = row.get("served_version"), row.get("policy_version")
    text = f"{count:.0f} workers confirmed version {version:.0f} and computed with something else"
    return Evidence(text if served in (None, version) else f"{text}; the answers fit version {served:.0f} best")


def served(run: History) -> Evidence | None:
    """The answers of workers to a fixed text are those of another version."""
    rows = [row for row in run.rows[-5:] if row.get("served_version") is not None]
    other = [row for row in rows if row["served_version"] != row["policy_version"]]
    if len(other) < 3:
        return None
    text = f"in {len(other)} of {len(rows)} publications the workers' answers to a fixed text fit another version best"
    return Evidence(f"{text}: {other[-1]['served_version']:.0f}, not {other[-1]['policy_version']:.0f}", 5)


def mismatch(run: History) -> Evidence | None:
    """Engines and trainer compute different probabilities.

    On tokens of the policy in training they are equal to rounding: 1e-13 nats where both compute in float32 and 1e-4 in
    bfloat16, in a mean of squares over few tokens. Stale tokens differ by some hundredths.
    """
    gaps = run.numbers("kl_behaviour", 5)
    if len(gaps) < 3:
        return None
    gap, floor = statistics.median(gaps), run.first["kl_behaviour"][0]
    text = f"engines and trainer differ by {gap:.2g} nats a token, at the first step by {floor:.2g}"
    if not run.is_on_policy:
        return Evidence(text, 3) if gap > 0.5 else None
    if gap > (1e-6 if floor < 1e-8 else 0.05) or (gap > 5e-3 and gap > 100 * floor):
        return Evidence(text, 3)
    return Evidence(text, 3, severity=DOUBT) if gap > min(max(1e-3, 20 * floor), 0.01) else None


def importance(run: History) -> Evidence | None:
    """The importance weight rejects tokens."""
    weights = run.numbers("importance_weight", 5)
    if len(weights) < 3 or (weight := statistics.median(weights)) >= 0.5:
        return None
    return Evidence(f"the mean importance weight is {weight:.2f}, so most tokens hardly count", 3)


def surprise(run: History) -> Evidence | None:
    """Sampled tokens are as surprising as the policy's entropy says, unless the engine samples from something else."""
    tokens, total, squares, *_ = run.sums("surprise")
    rows = [row for row in run.rows[-WINDOW:] if row.get("entropy") is not None and run.facts(row, "surprise")]
    expected = sum(row["entropy"] * run.facts(row, "surprise")[0] for row in rows)
    counted = sum(run.facts(row, "surprise")[0] for row in rows)
    if tokens < 1000 or counted < tokens or expected <= 0 or run.settled("updates_per_batch", 1) > 1:
        return None
    ratio, deviation = total / expected, math.sqrt(max(squares / tokens - (total / tokens) ** 2, 1e-12) * tokens)
    if 0.9 <= ratio <= 1.1 or abs(total - expected) < 5 * deviation:
        return None
    what = "likelier" if ratio < 1 else "less likely"
    text = f"sampled tokens are {what} than the policy says: {ratio:.2f} of its entropy over {tokens:.0f} tokens"
    return Evidence(text, len(rows))


def copies(run: History) -> Evidence | None:
    """The completions of a prompt are copies of each other, although that was unlikely."""
    groups, copied, *_ = run.sums("copies")
    if copied < 2 or copied < 0.01 * groups:
        return None
    text = f"{copied:.0f} of {groups:.0f} groups are copies of one answer, each by a chance below 1e-4"
    return Evidence(text, WINDOW, "copies")


def ends(run: History) -> Evidence | None:
    """Completions that stopped lack their end token."""
    stopped, lacking, *_ = run.sums("ends")
    if stopped < 50 or lacking < 0.01 * stopped:
        return None
    text = f"{lacking:.0f} of {stopped:.0f} completions stopped without an end token among their tokens"
    return Evidence(text, WINDOW, "ends")


def special(run: History) -> Evidence | None:
    """Completions have special tokens, such as padding, before their end."""
    tokens, odd, *_ = run.sums("special")
    if odd < 20 or odd < 0.03 * tokens:
        return None
    text = f"{odd:.0f} of {tokens:.0f} sampled tokens are special tokens that do not end an answer"
    return Evidence(text, WINDOW, "special")


def prompts(run: History) -> Evidence | None:
    """Prompts begin with a special token twice, or end with an end token."""
    count, broken, *_ = run.sums("prompt", 3)
    if broken < 3 or broken < 0.5 * count:
        return None
    return Evidence(
        f"{broken:.0f} of {count:.0f} prompts begin with a special token twice, or end like an answer", 3, "prompt"
    )


def cut_off(run: History) -> Evidence | None:
    """Most completions are cut off, or more and more of them."""
    rates = run.numbers("truncation_rate", 5)
    if len(rates) < 3:
        return None
    newest, before = statistics.fmean(rates[-3:]), statistics.fmean(run.first["truncation_rate"])
    limit = f"MAX_NEW_TOKENS={run.settled('max_new_tokens')}"
    if newest > 0.5:
        return Evidence(f"{newest:.0%} of the completions are cut off at {limit}", 3)
    if len(run.rows) >= 10 and (now := statistics.fmean(rates)) > before + 0.25:
        return Evidence(f"{now:.0%} of the completions are cut off at {limit}, {before:.0%} at first", 5)
    return None


# --- updates ---


def nothing_learned(run: History) -> Evidence | None:
    """Three steps in a row had no group whose rewards differ."""
    rows = run.rows[-3:]
    if len(rows) < 3 or any(row.get("trained_tokens") != 0 for row in rows):
        return None
    rewards, earlier = run.rewards, [row for row in run.rows if row.get("trained_tokens")]
    count = f"{rewards.total()} completions"
    if not rewards:
        return Evidence("no completion could be scored", 3, remedy=SAMPLES_PAGE)
    if set(rewards) == {0.0}:
        remedy = (
            f"{SAMPLES_PAGE}, try the reward function on a right answer, and ask in the prompt for the form it reads"
        )
        return Evidence(f"none of {count} got a reward; all have 0", 3, remedy=remedy)
    is_done = bool(earlier) and min(rewards) >= 0.9 * max(row.get("reward_mean") or 0.0 for row in run.rows) > 0
    text = f"within each prompt's group, all rewards are equal ({count})"
    return Evidence(text, 3, severity=NOTE if is_done else "")


def ignores_answers(run: History) -> Evidence | None:
    """Rewards differ between prompts, and never between the answers to one."""
    groups, _, equal, *_ = run.sums("copies")
    rewards = run.rewards
    lowest = rewards[min(rewards)] if rewards else 0
    if groups < 30 or equal < 0.95 * groups or min(lowest, rewards.total() - lowest) < 0.1 * rewards.total():
        return None
    text = f"in {equal:.0f} of {groups:.0f} groups different answers got the same reward"
    return Evidence(f"{text}, though rewards differ between prompts", WINDOW)


def advantage(run: History) -> Evidence | None:
    """Better answers have lower advantages."""
    groups, total, *_ = run.sums("advantage")
    if groups < 10 or total >= 0.5 * groups:
        return None
    text = f"rewards and advantages have a correlation of {total / groups:.2f} within {groups:.0f} groups"
    return Evidence(text, WINDOW, "advantage")


def frozen(run: History) -> Evidence | None:
    """Steps with trained tokens publish the same weights."""
    rows = [row for row in run.rows[-WINDOW:] if row.get("trained_tokens") and row.get("grad_norm")][-3:]
    if (
        len(rows) < 3
        or run.settled("publish_type") != "bfloat16"
        or run.settled("lora_rank")
        or "workers" not in rows[0]
    ):
        return None
    if len({row.get("publish_share") for row in rows}) > 1:
        return None
    tokens = sum(row["trained_tokens"] for row in rows)
    gradient, rate = rows[-1]["grad_norm"], rows[-1].get("learning_rate", 0.0)
    text = f"the published weights have not changed in 3 steps with {tokens:.0f} trained tokens"
    return Evidence(f"{text}; learning rate {rate:g}, gradient {gradient:.2g}", 3)


def gradient(run: History) -> Evidence | None:
    """The gradient is next to nothing."""
    norms = [row["grad_norm"] for row in run.rows[-5:] if row.get("trained_tokens") and "grad_norm" in row]
    if len(norms) < 3 or (norm := statistics.median(norms)) >= 1e-4:
        return None
    return Evidence(f"the gradient's norm is {norm:.2g}, though rewards differ", 3)


def rate(run: History) -> Evidence | None:
    """The learning rate cannot be seen in the published weights."""
    rates, shares = run.numbers("learning_rate", 3), run.numbers("publish_share", 5)
    if len(run.rows) >= 3 and rates and 0 <= max(rates) < 1e-9:
        return Evidence(f"the learning rate is {max(rates):g}, which changes no weight", 3)
    if len(shares) >= 3 and (share := statistics.median(shares)) < 0.5:
        return Evidence(f"engines get {share:.2f} of what training has changed in the weights", 3)
    return None


def adapter_rate(run: History) -> Evidence | None:
    """A LoRA adapter is trained with a rate for whole weights."""
    rates = run.numbers("learning_rate", 3)
    if len(rates) < 3 or not run.settled("lora_rank") or max(rates) >= 5e-6:
        return None
    return Evidence(f"LORA_RANK={run.settled('lora_rank')} with a learning rate of {max(rates):g}", 3)


# --- rewards ---


def unequal(run: History) -> Evidence | None:
    """Equal answers to a prompt got unequal rewards; a judge's may."""
    pairs, different, *_ = run.sums("equal")
    if pairs < 30 or different < 0.02 * pairs or any(name.startswith("judge_") for name in run.rows[-1]):
        return None
    text = f"{different:.0f} of {pairs:.0f} pairs of equal answers to one prompt got unequal rewards"
    return Evidence(text, WINDOW, "equal")


def follows_length(run: History) -> Evidence | None:
    """Rewards follow the length of answers."""
    groups, total, *_ = run.sums("length")
    if groups < 20 or abs(correlation := total / groups) <= 0.7:
        return None
    way = "longer" if correlation > 0 else "shorter"
    text = f"the {way} an answer, the higher its reward: correlation {correlation:.2f} within {groups:.0f} groups"
    return Evidence(text, WINDOW)


def follows_place(run: History) -> Evidence | None:
    """Rewards follow an answer's place in its group."""
    groups, *places = run.sums("place")
    if groups < 20:
        return None
    share = sum((place / groups) ** 2 for place in places) / max(len(places), 1)
    if share <= 0.25 + 2 / groups:
        return None
    text = f"{share:.0%} of the rewards' variance is that of an answer's place in its group, in {groups:.0f} groups"
    return Evidence(text, WINDOW)


def falls(run: History) -> Evidence | None:
    """The mean reward falls, or was lost."""
    scored = run.scored
    best_step, best = max(scored[:-LOST_STEPS], key=lambda one: one[1], default=(0, 0.0))
    if best >= LEAST_BEST and all(reward < LOST_SHARE * best for _, reward in scored[-LOST_STEPS:]):
        text = f"the mean reward fell from {best:.3f} in step {best_step} to {scored[-1][1]:.3f}"
        return Evidence(text, LOST_STEPS)
    newest = [reward for _, reward in scored[-2 * WINDOW :]]
    if len(newest) < 10 or (z := _trend(newest)) >= -3.5:
        return None
    first, last = statistics.fmean(newest[:5]), statistics.fmean(newest[-5:])
    if first - last < 0.25 * (max(newest) - min(0.0, *newest)):
        return None
    return Evidence(f"the mean reward falls, from {first:.3f} to {last:.3f} (trend {z:.1f})", len(newest))


def _trend(values: Sequence[float]) -> float:
    """Return z of the trend of values (Mann 1945, Kendall 1975), without a correction for ties."""
    n = len(values)
    s = sum((b > a) - (b < a) for i, a in enumerate(values) for b in values[i + 1 :])
    return (s - math.copysign(1, s)) / math.sqrt(n * (n - 1) * (2 * n + 5) / 18) if s else 0.0


def unread(run: History) -> Evidence | None:
    """The verifier reads no answer out of most completions."""
    scored, without, *_ = run.sums("read", 3)
    if len(run.rows) < 3 or scored < 20 or without <= 0.5 * scored:
        return None
    return Evidence(f"the verifier found no answer in {without:.0f} of {scored:.0f} completions", 3, "read")


def failures(run: History) -> Evidence | None:
    """Completions failed, or are over a limit."""
    rows = run.rows[-3:]
    listed = [failure for row in rows for failure in row.get("failures", ())]
    if not listed:
        return None
    counts: Counter[str] = Counter()
    for reason, count, _ in listed:
        counts[reason] += count
    [(most, _)] = counts.most_common(1)
    message = next(text for reason, _, text in listed if reason == most)
    without_reward = sum(count for reason, count in counts.items() if reason not in OVER_LIMIT)
    total = run.rewards.total() + without_reward
    severity = NOTE if counts.total() < 0.05 * total else ""
    remedy = REMEDIES.get(most, "" if most == "no_call" else SAMPLES_PAGE)
    text = (
        f"{counts.total()} of {total} completions failed ({counted(counts)}); those over a limit are wrong, the others"
    )
    return Evidence(f"{text} have no reward. The most frequent failure: {message}", len(rows), "", severity, remedy)


# --- agents ---


def tools_unused(run: History) -> Evidence | None:
    """Tools are offered and never called."""
    episodes, parsed, unparsed, _, reward, *_ = run.sums("tools")
    if len(run.rows) < 3 or episodes < 20 or parsed or unparsed:
        return None
    text = f"tools were offered in {episodes:.0f} episodes and none was called"
    text = f"{text}; their mean reward is {reward / episodes:.2f}"
    return Evidence(text, WINDOW, "tools", WRONG if reward > 0.5 * episodes else "")


def tools_unread(run: History) -> Evidence | None:
    """Tool calls cannot be parsed."""
    _, parsed, unparsed, *_ = run.sums("tools", 5)
    if parsed + unparsed < 10 or unparsed <= parsed:
        return None
    return Evidence(f"{unparsed:.0f} of {parsed + unparsed:.0f} tool calls cannot be parsed", 5, "tools")


def tools_unneeded(run: History) -> Evidence | None:
    """Episodes without a tool call earn no less than those with one."""
    *_, without, reward, used, reward_used = [0.0, *run.sums("tools")[:7]]
    if min(without, used) < 20 or reward / without < max(0.5, reward_used / used):
        return None
    text = f"{without:.0f} episodes without a tool call earned {reward / without:.2f}, {used:.0f} with one"
    return Evidence(f"{text} {reward_used / used:.2f}", WINDOW, "tools")


# --- data ---


def again(run: History) -> Evidence | None:
    """Prompts come again within their epoch."""
    repeated, served = sum(run.repeated[-WINDOW:]), run.sums("prompt")[0]
    if repeated < 3 or repeated < 0.05 * served:
        return None
    text = f"{repeated} of {served:.0f} prompts had been served before in the same epoch"
    return Evidence(text, WINDOW)


def held_out(run: History) -> Evidence | None:
    """Held-out prompts are trained on."""
    both = run.held_out & run.trained
    if not both:
        return None
    return Evidence(f"{len(both)} of {len(run.held_out)} held-out prompts that were looked at are trained on, too")


def starved(run: History) -> Evidence | None:
    """A source teaches nothing while others do."""
    shares = {}
    for source in run.sources:
        shares[source] = sum(run.numbers(f"groups/{source}")), sum(run.numbers(f"zero_variance_groups/{source}"))
    for source, (groups, equal) in shares.items():
        others = [(n, e) for other, (n, e) in shares.items() if other != source and e < 0.75 * n]
        if groups >= WINDOW and equal >= 0.98 * groups and others:
            text = f"in {equal:.0f} of {groups:.0f} groups of the source {source} all rewards are equal"
            return Evidence(f"{text}, in {others[0][1]:.0f} of {others[0][0]:.0f} of another", WINDOW)
    for source, last in run.sources.items():
        if run.rows[-1]["step"] - last >= 2 * WINDOW:
            return Evidence(f"the source {source} has had no group since step {last}", 2 * WINDOW)
    return None


# --- course ---


def worse(run: History) -> Evidence | None:
    """The accuracy is below that before training, beyond chance."""
    row = run.rows[-1]
    if (high := row.get("accuracy_high")) is None or run.accuracy_before is None or high >= run.accuracy_before:
        return None
    text = f"the accuracy is {row['accuracy']:.3f}, at most {high:.3f}; before training it was at least"
    return Evidence(f"{text} {run.accuracy_before:.3f}")


def length(run: History) -> Evidence | None:
    """Completions become much shorter or longer while their reward does not rise."""
    lengths, rewards = run.numbers("length_mean", 5), run.numbers("reward_mean", 5)
    if len(run.rows) < 10 or len(lengths) < 5 or not rewards:
        return None
    first, last = statistics.fmean(run.first["length_mean"]), statistics.fmean(lengths)
    if first / 3 <= last <= 3 * first:
        return None
    rises = statistics.fmean(rewards) > statistics.fmean(run.first["reward_mean"])
    text = f"completions have {last:.1f} tokens in the mean, {first:.1f} at first"
    return Evidence(text, 5, severity=NOTE if rises else "")


def entropy(run: History) -> Evidence | None:
    """The policy has settled, although its answers are not right."""
    [now], first, rewards = run.numbers("entropy_all", 1) or [math.inf], run.first["entropy_all"], run.rewards
    if not (rewards and first) or now >= max(0.02, 0.05 * first[0]):
        return None
    mean = sum(reward * count for reward, count in rewards.items()) / rewards.total()
    best = max(max(rewards), *(reward for _, reward in run.scored))
    text = f"the policy's entropy is {now:.3g} nats a token, {first[0]:.3g} at first; the mean reward {mean:.2f}"
    return Evidence(text, 1, severity=NOTE if mean >= 0.9 * best > 0 else "")


def critic(run: History) -> Evidence | None:
    """The critic explains nothing of the returns."""
    values = run.numbers("explained_variance")
    if len(run.rows) < 50 or len(values) < WINDOW or (share := statistics.median(values)) >= 0.02:
        return None
    return Evidence(f"the critic explains {share:.2f} of the returns' variance", WINDOW)


def teacher(run: History) -> Evidence | None:
    """The teacher finds nearly all of the policy's tokens unlikely."""
    distances, overlaps = run.numbers("teacher_k1", 3), run.numbers("teacher_overlap")
    if len(distances) < 3 or (distance := statistics.fmean(distances)) <= 4.0:
        return None
    text = f"a token of the policy is {distance:.1f} nats less likely to the teacher"
    return Evidence(text + (f"; {overlaps[-1]:.0%} of the likeliest tokens are common" if overlaps else ""), 3)


@dataclass(frozen=True)
class Rule:
    """A row of the table: what to call it, how bad and how sure it is, its check, its likely cause and its remedy."""

    name: str
    severity: str
    certainty: str
    check: Check
    """The first line of its docstring is the symptom."""
    cause: str
    remedy: str


RULES = (
    Rule("worker refused", WRONG, CERTAIN, refused,
         "the update of its weights was lost, though the engine confirmed it",
         "See the engine's log, PUBLISH_TRANSPORT and ROLLOUT_ENGINE"),
    Rule("served version", DOUBT, LIKELY, served,
         "engines serve another version, or the trainer's own forward pass is off",
         "See workers_proven: if it counts all workers, their weights are right, and the trainer computes otherwise"),
    Rule("mismatch", WRONG, LIKELY, mismatch,
         "engines serve other weights than the trainer has, or one of the two computes another model: positions, "
         "masks, rotary frequencies, temperature",
         "See workers_proven and workers_refused; compare types, templates and TEMPERATURE of both"),
    Rule("importance weights", DOUBT, LIKELY, importance,
         "the log-probabilities of the engines are not those of the policy that sampled",
         "Look at kl_behaviour first; then IMPORTANCE_CORRECTION, MAX_STALENESS"),
    Rule("sampling", WRONG, CERTAIN, surprise,
         "the engine samples from another distribution than it reports: top-k, top-p, penalties or another "
         "temperature",
         "See generation_config.json of the model, SGLANG_EXTRA_FLAGS and TEMPERATURE"),
    Rule("copies", WRONG, CERTAIN, copies, "all completions of a prompt have one seed", "See ENGINE_DETERMINISTIC"),
    Rule("end token", WRONG, CERTAIN, ends,
         "the engine cuts the end token off, which is therefore never trained",
         "Keep the token of a stop among output_ids, and use no stop texts"),
    Rule("special tokens", DOUBT, LIKELY, special,
         "the model samples padding or markers that no template writes within an answer",
         "See the tokenizer's special tokens and MODEL_NAME: a base model may lack this template"),
    Rule("prompts", DOUBT, CERTAIN, prompts,
         "chat template and tokenizer both add a special token",
         "See rendered_prompt in samples.jsonl, and PROMPT_STYLE"),
    Rule("cut off", DOUBT, CERTAIN, cut_off,
         "answers do not end within the limit", "Raise MAX_NEW_TOKENS, or shorten answers by OVERLONG_BUFFER"),
    Rule("nothing learned", DOUBT, POSSIBLE, nothing_learned,
         "the prompts may be too easy or too hard, or the reward may not tell answers apart", SAMPLES_PAGE),
    Rule("reward ignores answers", DOUBT, POSSIBLE, ignores_answers,
         "the reward may depend on the row alone, such as on a column that the prompt does not show",
         "Try the reward function on a right and a wrong answer to one row"),
    Rule("advantages", WRONG, CERTAIN, advantage,
         "the advantages have the wrong sign or belong to other answers",
         "See ADVANTAGE; `grpo explain` shows the advantages of a step"),
    Rule("weights stand still", WRONG, CERTAIN, frozen,
         "the optimizer's parameters are not those that are published",
         "See LEARNING_RATE and what is frozen; `grpo verify` computes the steps again"),
    Rule("gradient", WRONG, LIKELY, gradient,
         "advantages, a coefficient or a mask make the loss next to nothing",
         "See ADVANTAGE, REWARD_WEIGHT and the coefficients of the loss"),
    Rule("learning rate", WRONG, CERTAIN, rate,
         "the change is smaller than the type of the published weights can show",
         "Raise LEARNING_RATE, or set PUBLISH_TYPE=float32"),
    Rule("adapter's learning rate", DOUBT, LIKELY, adapter_rate,
         "adapters need 10 to 30 times the rate of whole weights", "Leave LEARNING_RATE unset, or set 3e-5"),
    Rule("equal answers, unequal rewards", DOUBT, LIKELY, unequal,
         "a reward function catches its own failures and returns a number, rewards belong to other answers, or they "
         "are random",
         "Let the reward raise: such an answer has no reward. Then see the order of its results"),
    Rule("reward follows length", NOTE, POSSIBLE, follows_length, "the reward pays form or length", SAMPLES_PAGE),
    Rule("reward follows place", DOUBT, LIKELY, follows_place,
         "results are given to other answers than they are of, or a judge prefers a place",
         "See the order of the reward's results; JUDGE_ settings change the order of what is compared"),
    Rule("reward falls", DOUBT, POSSIBLE, falls,
         "the updates are too large, or the reward pulls elsewhere",
         f"{SAMPLES_PAGE}; a smaller LEARNING_RATE is the first thing to try, from a checkpoint before"),
    Rule("answers unread", DOUBT, LIKELY, unread,
         "completions lack the form in which the verifier expects an answer",
         "Ask for the form in INSTRUCTION or SYSTEM_PROMPT; see extracted and reason in Samples"),
    Rule("failures", DOUBT, CERTAIN, failures, "", SAMPLES_PAGE),
    Rule("tools unused", DOUBT, LIKELY, tools_unused,
         "the chat template ignores tools, or the calls' form is not recognised",
         "See the gateway's log and the conversations in Samples; choose a model whose template writes tools"),
    Rule("tool calls unread", DOUBT, LIKELY, tools_unread,
         "the model writes calls in a form that its parser does not know",
         "See the conversations in Samples; give examples in the agent's first messages"),
    Rule("tools unneeded", DOUBT, POSSIBLE, tools_unneeded,
         "the reward can be had without the tools",
         "See Samples of episodes without a call, and what the reward checks"),
    Rule("prompts again", WRONG, LIKELY, again,
         "the cursor into the data stands still or goes back", "See the data-server's log, and cursors at its /stats"),
    Rule("held-out prompts", DOUBT, CERTAIN, held_out,
         "the training data contain the questions of the evaluation",
         "Remove the duplicates, or see DATASET_HELD_OUT and DATASET_TEST"),
    Rule("source starves", DOUBT, LIKELY, starved,
         "the source is too easy or too hard, or its groups fail",
         "See the source's samples, its ratio and its reward_fn in SOURCES"),
    Rule("worse than before", DOUBT, LIKELY, worse,
         "training unlearns what evaluation measures", "Lower LEARNING_RATE; compare the reward with ACCURACY_FN"),
    Rule("length", DOUBT, POSSIBLE, length,
         "the reward pays length, or the policy degenerates", f"{SAMPLES_PAGE}; OVERLONG_BUFFER, AGGREGATION"),
    Rule("entropy", DOUBT, LIKELY, entropy,
         "the policy has settled on answers that are not right", "Lower LEARNING_RATE, or set ENTROPY_COEF=0.001"),
    Rule("critic", DOUBT, LIKELY, critic,
         "the critic has not learned", "Raise CRITIC_LEARNING_RATE, CRITIC_WARMUP_STEPS"),
    Rule("teacher", DOUBT, LIKELY, teacher,
         "teacher and policy have other tokens, templates or prompts",
         "Compare both tokenizers and chat templates; see TEACHER_MODEL"),
)  # fmt: skip
"""All rules."""
