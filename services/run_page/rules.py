"""The rules that say what is wrong with a run, in one table, RULES.

A rule's check reads the newest steps of the run's ``History`` and yields its evidence; nothing if all is well, and of
several the first counts. Checks of one shape, ``share`` and ``level``, stand in the table, the others are functions.
Facts are sums over groups, which trainer/reporting/group_facts.py has counted and explains. Trainer, terminal, ``grpo
status``, ``grpo diagnose``, run page and alerts show what the rules find; docs/guides/diagnosing.md explains each.
Thresholds were chosen on the runs of tests/museum/, healthy ones and others with a known fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from operator import itemgetter
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

from services.run_page.progress import completions, counted, failures

if TYPE_CHECKING:
    from services.run_page.diagnosis import History

WRONG, DOUBT, NOTE = "wrong", "doubt", "note"
"""The severities: the run computes something else than it should; it may; it does, and that is often intended."""
CERTAIN, LIKELY, POSSIBLE = "certain", "likely", "possible"
"""The degrees of certainty of a cause."""
WINDOW = 20
"""Steps over which facts about groups are added up."""
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
    """The evidence of a check, without its full stop, the newest steps on which it rests, and where to look.

    ``fact`` names the fact whose examples are samples; ``severity`` and ``remedy`` replace the rule's.
    """

    text: str
    steps: int = 1
    fact: str = ""
    severity: str = ""
    remedy: str = ""


Check = Callable[["History"], Iterator[Evidence]]
Statistic = Callable[[Sequence[float]], float]


def share(
    fact: str, text: str, *, of: float, least: float = 0, among: float = 0, steps: int = WINDOW, after: int = 0
) -> Check:
    """Return the check that a fact's second sum is at least the share ``of`` its first.

    Args:
        fact: its name.
        text: the evidence after "5 of 8".
        of: the share.
        least: smallest second sum.
        among: smallest first sum.
        steps: newest steps that are added up.
        after: steps that the run must have.
    """

    def check(run: History) -> Iterator[Evidence]:
        whole, part, *_ = run.sums(fact, steps)
        if len(run.rows) >= after and whole >= among and part >= max(least, of * whole):
            yield Evidence(f"{part:.0f} of {whole:.0f} {text}", steps, fact)

    return check


def level(
    column: str, text: str, *, below: float, by: Statistic = median, steps: int = 5, where: str | None = None
) -> Check:
    """Return the check that a column's numbers are low.

    Args:
        column: of metrics.jsonl.
        text: the evidence, with a place for the number.
        below: smallest usual number.
        by: makes one number of those of the newest steps, which must be three.
        steps: newest steps.
        where: a column that must not be 0 there.
    """

    def check(run: History) -> Iterator[Evidence]:
        numbers = run.numbers(column, steps, where)
        if len(numbers) >= 3 and (number := by(numbers)) < below:
            yield Evidence(text.format(number), 3)

    return check


# --- weights, tokens, numbers ---


def _refused(run: History) -> Iterator[Evidence]:
    row = run.rows[-1]
    if count := row.get("workers_refused"):
        served, version = row.get("served_version"), row.get("policy_version")
        text = f"{count:.0f} workers confirmed version {version:.0f} and computed with something else"
        yield Evidence(text if served in (None, version) else f"{text}; the answers fit version {served:.0f} best")


def _served(run: History) -> Iterator[Evidence]:
    rows = [row for row in run.rows[-5:] if row.get("served_version") is not None]
    pairs = [(row["served_version"], row["policy_version"]) for row in rows]
    others = [(served, version) for served, version in pairs if served != version]
    if len(others) >= 3:
        text = f"in {len(others)} of {len(rows)} publications the workers' answers to a fixed text fit another version"
        yield Evidence(f"{text} best: {others[-1][0]:.0f}, not {others[-1][1]:.0f}", 5)


def _mismatch(run: History) -> Iterator[Evidence]:
    """Compare log-probabilities.

    On tokens of the policy in training they are equal to rounding: 1e-13 nats where both compute in float32 and 1e-4 in
    bfloat16, in a mean of squares over few tokens. Stale tokens differ by some hundredths.
    """
    if len(gaps := run.numbers("kl_behaviour", 5)) < 3:
        return
    gap, floor = median(gaps), run.first("kl_behaviour")[0]
    wrong = doubtful = 0.5
    if run.is_on_policy:
        wrong = 1e-6 if floor < 1e-8 else min(max(5e-3, 100 * floor), 0.05)
        doubtful = min(max(1e-3, 20 * floor), 0.01)
    if gap > min(wrong, doubtful):
        text = f"engines and trainer differ by {gap:.2g} nats a token, at the first step by {floor:.2g}"
        yield Evidence(text, 3, severity=WRONG if gap > wrong else DOUBT)


def _sampling(run: History) -> Iterator[Evidence]:
    tokens, total, squares, *_ = run.sums("surprise")
    newest = zip(run.rows[-WINDOW:], run.facts[-WINDOW:], strict=True)
    known = [
        (row["entropy"], facts["surprise"][0]) for row, facts in newest if "surprise" in facts and "entropy" in row
    ]
    expected, counted = sum(entropy * count for entropy, count in known), sum(count for _, count in known)
    if tokens < 1000 or counted < tokens or expected <= 0 or run.settings.get("updates_per_batch", 1) > 1:
        return
    ratio, deviation = total / expected, math.sqrt(max(squares / tokens - (total / tokens) ** 2, 1e-12) * tokens)
    if not 0.9 <= ratio <= 1.1 and abs(total - expected) >= 5 * deviation:
        what = "likelier" if ratio < 1 else "less likely"
        text = f"sampled tokens are {what} than the policy says: {ratio:.2f} of its entropy over {tokens:.0f} tokens"
        yield Evidence(text, len(known))


def _cut_off(run: History) -> Iterator[Evidence]:
    if len(rates := run.numbers("truncation_rate", 5)) < 3:
        return
    text = f"of the completions are cut off at MAX_NEW_TOKENS={run.settings.get('max_new_tokens')}"
    newest, before = fmean(rates[-3:]), fmean(run.first("truncation_rate"))
    if newest > 0.5:
        yield Evidence(f"{newest:.0%} {text}", 3)
    elif len(run.rows) >= 10 and fmean(rates) > before + 0.25:
        yield Evidence(f"{fmean(rates):.0%} {text}, {before:.0%} at first", 5)


# --- updates ---


def _nothing_learned(run: History) -> Iterator[Evidence]:
    rewards = run.rewards
    if len(run.rows) < 3 or any(row.get("trained_tokens") != 0 for row in run.rows[-3:]):
        return
    if not rewards:
        yield Evidence("no completion could be scored", 3)
    elif set(rewards) == {0.0}:
        remedy = "try the reward function on a right answer, and ask in the prompt for the form it reads"
        text = f"none of {rewards.total()} completions got a reward; all have 0"
        yield Evidence(text, 3, remedy=f"{SAMPLES_PAGE}, {remedy}")
    else:
        best = max((reward for _, reward in run.scored), default=0.0)
        is_done = min(rewards) >= 0.9 * best > 0 and any(row.get("trained_tokens") for row in run.rows)
        text = f"within each prompt's group, all rewards are equal ({rewards.total()} completions)"
        yield Evidence(text, 3, severity=NOTE if is_done else DOUBT)


def _ignores_answers(run: History) -> Iterator[Evidence]:
    groups, _, equal, *_ = run.sums("copies")
    total, rewards = run.rewards.total(), run.rewards
    if groups >= 30 and equal >= 0.95 * groups and rewards and 0.1 <= rewards[min(rewards)] / total <= 0.9:
        text = f"in {equal:.0f} of {groups:.0f} groups different answers got the same reward"
        yield Evidence(f"{text}, though rewards differ between prompts", WINDOW)


def _advantages(run: History) -> Iterator[Evidence]:
    groups, total, *_ = run.sums("advantage")
    if groups >= 10 and total < 0.5 * groups:
        text = f"rewards and advantages have a correlation of {total / groups:.2f} within {groups:.0f} groups"
        yield Evidence(text, WINDOW, "advantage")


def _frozen(run: History) -> Iterator[Evidence]:
    rows = [row for row in run.rows[-WINDOW:] if row.get("trained_tokens") and row.get("grad_norm")][-3:]
    shows_changes = run.settings.get("publish_type") == "bfloat16" and not run.settings.get("lora_rank")
    is_equal = len({row.get("publish_share") for row in rows}) == 1
    if len(rows) == 3 and shows_changes and "workers" in rows[0] and is_equal:
        tokens, rate = sum(row["trained_tokens"] for row in rows), rows[-1].get("learning_rate", 0.0)
        text = f"the published weights have not changed in 3 steps with {tokens:.0f} trained tokens"
        yield Evidence(f"{text}; learning rate {rate:g}, gradient {rows[-1]['grad_norm']:.2g}", 3)


def _learning_rate(run: History) -> Iterator[Evidence]:
    text = "the learning rate is {:g}, which changes no weight"
    yield from level("learning_rate", text, below=1e-9, by=max, steps=3)(run)
    yield from level("publish_share", "engines get {:.2f} of what training has changed in the weights", below=0.5)(run)


def _adapter_rate(run: History) -> Iterator[Evidence]:
    if rank := run.settings.get("lora_rank"):
        text = f"LORA_RANK={rank} with a learning rate of {{:g}}"
        yield from level("learning_rate", text, below=5e-6, by=max, steps=3)(run)


# --- rewards ---


def _unequal(run: History) -> Iterator[Evidence]:
    # A judge's rewards of equal answers may differ.
    if not any(name.startswith("judge_") for name in run.rows[-1]):
        yield from share("equal", "pairs of equal answers to one prompt got unequal rewards", of=0.02, among=30)(run)


def _follows_length(run: History) -> Iterator[Evidence]:
    groups, total, *_ = run.sums("length")
    if groups >= 20 and abs(correlation := total / groups) > 0.7:
        text = f"the {'longer' if correlation > 0 else 'shorter'} an answer, the higher its reward"
        yield Evidence(f"{text}: correlation {correlation:.2f} within {groups:.0f} groups", WINDOW)


def _follows_place(run: History) -> Iterator[Evidence]:
    groups, *places = run.sums("place")
    if groups >= 20 and (part := fmean((place / groups) ** 2 for place in places)) > 0.25 + 2 / groups:
        text = f"{part:.0%} of the rewards' variance is that of an answer's place in its group"
        yield Evidence(f"{text}, in {groups:.0f} groups", WINDOW)


def _falls(run: History) -> Iterator[Evidence]:
    best_step, best = max(run.scored[:-LOST_STEPS], key=itemgetter(1), default=(0, 0.0))
    newest = [reward for _, reward in run.scored[-2 * WINDOW :]]
    if best >= LEAST_BEST and max(newest[-LOST_STEPS:]) < LOST_SHARE * best:
        text = f"the mean reward fell from {best:.3f} in step {best_step} to {newest[-1]:.3f}"
        yield Evidence(text, LOST_STEPS)
    if len(newest) >= 10 and (z := _trend(newest)) < -3.5:
        first, last = fmean(newest[:5]), fmean(newest[-5:])
        if first - last >= 0.25 * (max(newest) - min(0.0, *newest)):
            text = f"the mean reward falls, from {first:.3f} to {last:.3f} (trend {z:.1f})"
            yield Evidence(text, len(newest))


def _trend(values: Sequence[float]) -> float:
    """Return z of the trend of values (Mann 1945, Kendall 1975), without a correction for ties."""
    n, s = len(values), sum((b > a) - (b < a) for a, b in combinations(values, 2))
    return (s - math.copysign(1, s)) / math.sqrt(n * (n - 1) * (2 * n + 5) / 18) if s else 0.0


def _failures(run: History) -> Iterator[Evidence]:
    rows = run.rows[-3:]
    if not (counts := failures(rows)):
        return
    [(most, _)], total = counts.most_common(1), completions(rows)
    message = next(text for row in rows for reason, _, text in row.get("failures", ()) if reason == most)
    yield Evidence(
        f"{counts.total()} of {total} completions failed ({counted(counts)}); those over a limit are wrong, the others "
        f"have no reward. The most frequent failure: {message}",
        len(rows),
        severity=NOTE if counts.total() < 0.05 * total else DOUBT,
        remedy=REMEDIES.get(most, ""),
    )


# --- agents ---


def _tools_unused(run: History) -> Iterator[Evidence]:
    episodes, parsed, unparsed, _, reward, *_ = run.sums("tools")
    if len(run.rows) >= 3 and episodes >= 20 and not parsed + unparsed:
        text = f"tools were offered in {episodes:.0f} episodes and none was called"
        severity = WRONG if reward > 0.5 * episodes else DOUBT
        yield Evidence(f"{text}; their mean reward is {reward / episodes:.2f}", WINDOW, "tools", severity)


def _tools_unread(run: History) -> Iterator[Evidence]:
    _, parsed, unparsed, *_ = run.sums("tools", 5)
    if parsed + unparsed >= 10 and unparsed > parsed:
        yield Evidence(f"{unparsed:.0f} of {parsed + unparsed:.0f} tool calls cannot be parsed", 5, "tools")


def _tools_unneeded(run: History) -> Iterator[Evidence]:
    _, _, _, without, reward, used, reward_used, *_ = run.sums("tools")
    if min(without, used) >= 20 and reward / without >= max(0.5, reward_used / used):
        text = f"{without:.0f} episodes without a tool call earned {reward / without:.2f}"
        yield Evidence(f"{text}, {used:.0f} with one {reward_used / used:.2f}", WINDOW, "tools")


# --- data ---


def _held_out(run: History) -> Iterator[Evidence]:
    if both := run.held_out & run.trained:
        yield Evidence(f"{len(both)} of {len(run.held_out)} held-out prompts that were looked at are trained on, too")


def _starved(run: History) -> Iterator[Evidence]:
    columns = ("groups", "zero_variance_groups")
    counts = {source: [sum(run.numbers(f"{column}/{source}")) for column in columns] for source in run.sources}
    teaching = next(((groups, equal) for groups, equal in counts.values() if equal < 0.75 * groups), None)
    for source, (groups, equal) in counts.items():
        if groups >= WINDOW and equal >= 0.98 * groups and teaching:
            text = f"in {equal:.0f} of {groups:.0f} groups of the source {source} all rewards are equal"
            yield Evidence(f"{text}, in {teaching[1]:.0f} of {teaching[0]:.0f} of another", WINDOW)
    for source, last in run.sources.items():
        if run.rows[-1]["step"] - last >= 2 * WINDOW:
            yield Evidence(f"the source {source} has had no group since step {last}", 2 * WINDOW)


# --- course ---


def _worse(run: History) -> Iterator[Evidence]:
    row, before = run.rows[-1], run.accuracy_before
    if before is not None and (high := row.get("accuracy_high")) is not None and high < before:
        text = f"the accuracy is {row['accuracy']:.3f}, at most {high:.3f}"
        yield Evidence(f"{text}; before training it was at least {before:.3f}")


def _length(run: History) -> Iterator[Evidence]:
    lengths, rewards = run.numbers("length_mean", 5), run.numbers("reward_mean", 5)
    if len(run.rows) < 10 or len(lengths) < 5 or not rewards:
        return
    first, last = fmean(run.first("length_mean")), fmean(lengths)
    if not first / 3 <= last <= 3 * first:
        rises = fmean(rewards) > fmean(run.first("reward_mean"))
        text = f"completions have {last:.1f} tokens in the mean, {first:.1f} at first"
        yield Evidence(text, 5, severity=NOTE if rises else DOUBT)


def _entropy(run: History) -> Iterator[Evidence]:
    rewards = run.rewards
    if not rewards or not (newest := run.numbers("entropy_all", 1)):
        return
    now, first = newest[0], run.first("entropy_all")[0]
    if now < max(0.02, 0.05 * first):
        mean = sum(reward * count for reward, count in rewards.items()) / rewards.total()
        best = max(*rewards, *(reward for _, reward in run.scored))
        text = f"the policy's entropy is {now:.3g} nats a token, {first:.3g} at first; the mean reward {mean:.2f}"
        yield Evidence(text, severity=NOTE if mean >= 0.9 * best > 0 else DOUBT)


def _critic(run: History) -> Iterator[Evidence]:
    shares = run.numbers("explained_variance")
    if len(run.rows) >= 50 and len(shares) == WINDOW and median(shares) < 0.02:
        yield Evidence(f"the critic explains {median(shares):.2f} of the returns' variance", WINDOW)


def _teacher(run: History) -> Iterator[Evidence]:
    distances, overlaps = run.numbers("teacher_k1", 3), run.numbers("teacher_overlap")
    if len(distances) == 3 and fmean(distances) > 4.0:
        text = f"a token of the policy is {fmean(distances):.1f} nats less likely to the teacher"
        yield Evidence(text + (f"; {overlaps[-1]:.0%} of the likeliest tokens are common" if overlaps else ""), 3)


class Rule(NamedTuple):
    """A row of the table; ``grpo diagnose`` shows all of it but the symptom."""

    name: str
    severity: str
    certainty: str
    symptom: str
    check: Check
    cause: str
    remedy: str


RULES = (
    Rule("worker refused", WRONG, CERTAIN, "Workers confirmed a version and computed with something else.", _refused,
         "the update of its weights was lost, though the engine confirmed it",
         "See the engine's log, PUBLISH_TRANSPORT and ROLLOUT_ENGINE"),
    Rule("served version", DOUBT, LIKELY, "The answers of workers to a fixed text are those of another version.",
         _served, "engines serve another version, or the trainer's own forward pass is off",
         "See workers_proven: if it counts all workers, their weights are right, and the trainer computes otherwise"),
    Rule("mismatch", WRONG, LIKELY, "Engines and trainer compute different probabilities.", _mismatch,
         "engines serve other weights than the trainer has, or one of the two computes another model: positions, "
         "masks, rotary frequencies, temperature",
         "See workers_proven and workers_refused; compare types, templates and TEMPERATURE of both"),
    Rule("importance weights", DOUBT, LIKELY, "The importance weight rejects tokens.",
         level("importance_weight", "the mean importance weight is {:.2f}, so most tokens hardly count", below=0.5),
         "the log-probabilities of the engines are not those of the policy that sampled",
         "Look at kl_behaviour first; then IMPORTANCE_CORRECTION, MAX_STALENESS"),
    Rule("sampling", WRONG, CERTAIN,
         "Sampled tokens are as surprising as the policy's entropy says, unless the engine samples from something "
         "else.", _sampling,
         "the engine samples from another distribution than it reports: top-k, top-p, penalties or another "
         "temperature",
         "See generation_config.json of the model, SGLANG_EXTRA_FLAGS and TEMPERATURE"),
    Rule("copies", WRONG, CERTAIN,
         "The completions of a prompt are copies of each other, although that was unlikely.",
         share("copies", "groups are copies of one answer, each by a chance below 1e-4", of=0.01, least=2),
         "all completions of a prompt have one seed", "See ENGINE_DETERMINISTIC"),
    Rule("end token", WRONG, CERTAIN, "Completions that stopped lack their end token.",
         share("ends", "completions stopped without an end token among their tokens", of=0.01, among=50),
         "the engine cuts the end token off, which is therefore never trained",
         "Keep the token of a stop among output_ids, and use no stop texts"),
    Rule("special tokens", DOUBT, LIKELY, "Completions have special tokens, such as padding, before their end.",
         share("special", "sampled tokens are special tokens that do not end an answer", of=0.03, least=20),
         "the model samples padding or markers that no template writes within an answer",
         "See the tokenizer's special tokens and MODEL_NAME: a base model may lack this template"),
    Rule("prompts", DOUBT, CERTAIN, "Prompts begin with a special token twice, or end with an end token.",
         share("prompt", "prompts begin with a special token twice, or end like an answer", of=0.5, least=3, steps=3),
         "chat template and tokenizer both add a special token",
         "See rendered_prompt in samples.jsonl, and PROMPT_STYLE"),
    Rule("cut off", DOUBT, CERTAIN, "Most completions are cut off, or more and more of them.", _cut_off,
         "answers do not end within the limit", "Raise MAX_NEW_TOKENS, or shorten answers by OVERLONG_BUFFER"),
    Rule("nothing learned", DOUBT, POSSIBLE, "Three steps in a row had no group whose rewards differ.",
         _nothing_learned,
         "the prompts may be too easy or too hard, or the reward may not tell answers apart", SAMPLES_PAGE),
    Rule("reward ignores answers", DOUBT, POSSIBLE,
         "Rewards differ between prompts, and never between the answers to one.", _ignores_answers,
         "the reward may depend on the row alone, such as on a column that the prompt does not show",
         "Try the reward function on a right and a wrong answer to one row"),
    Rule("advantages", WRONG, CERTAIN, "Better answers have lower advantages.", _advantages,
         "the advantages have the wrong sign or belong to other answers",
         "See ADVANTAGE; `grpo explain` shows the advantages of a step"),
    Rule("weights stand still", WRONG, CERTAIN, "Steps with trained tokens publish the same weights.", _frozen,
         "the optimizer's parameters are not those that are published",
         "See LEARNING_RATE and what is frozen; `grpo verify` computes the steps again"),
    Rule("gradient", WRONG, LIKELY, "The gradient is next to nothing.",
         level("grad_norm", "the gradient's norm is {:.2g}, though rewards differ", below=1e-4, where="trained_tokens"),
         "advantages, a coefficient or a mask make the loss next to nothing",
         "See ADVANTAGE, REWARD_WEIGHT and the coefficients of the loss"),
    Rule("learning rate", WRONG, CERTAIN, "The learning rate cannot be seen in the published weights.", _learning_rate,
         "the change is smaller than the type of the published weights can show",
         "Raise LEARNING_RATE, or set PUBLISH_TYPE=float32"),
    Rule("adapter's learning rate", DOUBT, LIKELY, "A LoRA adapter is trained with a rate for whole weights.",
         _adapter_rate, "adapters need 10 to 30 times the rate of whole weights",
         "Leave LEARNING_RATE unset, or set 3e-5"),
    Rule("equal answers, unequal rewards", DOUBT, LIKELY,
         "Equal answers to a prompt got unequal rewards; a judge's may.", _unequal,
         "a reward function catches its own failures and returns a number, rewards belong to other answers, or they "
         "are random",
         "Let the reward raise: such an answer has no reward. Then see the order of its results"),
    Rule("reward follows length", NOTE, POSSIBLE, "Rewards follow the length of answers.", _follows_length,
         "the reward pays form or length", SAMPLES_PAGE),
    Rule("reward follows place", DOUBT, LIKELY, "Rewards follow an answer's place in its group.", _follows_place,
         "results are given to other answers than they are of, or a judge prefers a place",
         "See the order of the reward's results; JUDGE_ settings change the order of what is compared"),
    Rule("reward falls", DOUBT, POSSIBLE, "The mean reward falls, or was lost.", _falls,
         "the updates are too large, or the reward pulls elsewhere",
         f"{SAMPLES_PAGE}; a smaller LEARNING_RATE is the first thing to try, from a checkpoint before"),
    Rule("answers unread", DOUBT, LIKELY, "The verifier reads no answer out of most completions.",
         share("read", "completions have no answer that the verifier finds", of=0.5, among=20, steps=3, after=3),
         "completions lack the form in which the verifier expects an answer",
         "Ask for the form in INSTRUCTION or SYSTEM_PROMPT; see extracted and reason in Samples"),
    Rule("failures", DOUBT, CERTAIN, "Completions failed, or are over a limit.", _failures, "", SAMPLES_PAGE),
    Rule("tools unused", DOUBT, LIKELY, "Tools are offered and never called.", _tools_unused,
         "the chat template ignores tools, or the calls' form is not recognised",
         "See the gateway's log and the conversations in Samples; choose a model whose template writes tools"),
    Rule("tool calls unread", DOUBT, LIKELY, "Tool calls cannot be parsed.", _tools_unread,
         "the model writes calls in a form that its parser does not know",
         "See the conversations in Samples; give examples in the agent's first messages"),
    Rule("tools unneeded", DOUBT, POSSIBLE, "Episodes without a tool call earn no less than those with one.",
         _tools_unneeded, "the reward can be had without the tools",
         "See Samples of episodes without a call, and what the reward checks"),
    Rule("prompts again", WRONG, LIKELY, "Prompts come again within their epoch.",
         share("again", "prompts had been served before in the same epoch", of=0.05, least=3),
         "the cursor into the data stands still or goes back", "See the data-server's log, and cursors at its /stats"),
    Rule("held-out prompts", DOUBT, CERTAIN, "Held-out prompts are trained on.", _held_out,
         "the training data contain the questions of the evaluation",
         "Remove the duplicates, or see DATASET_HELD_OUT and DATASET_TEST"),
    Rule("source starves", DOUBT, LIKELY, "A source teaches nothing while others do.", _starved,
         "the source is too easy or too hard, or its groups fail",
         "See the source's samples, its ratio and its reward_fn in SOURCES"),
    Rule("worse than before", DOUBT, LIKELY, "The accuracy is below that before training, beyond chance.", _worse,
         "training unlearns what evaluation measures", "Lower LEARNING_RATE; compare the reward with ACCURACY_FN"),
    Rule("length", DOUBT, POSSIBLE,
         "Completions become much shorter or longer while their reward does not rise.", _length,
         "the reward pays length, or the policy degenerates", f"{SAMPLES_PAGE}; OVERLONG_BUFFER, AGGREGATION"),
    Rule("entropy", DOUBT, LIKELY, "The policy has settled, although its answers are not right.", _entropy,
         "the policy has settled on answers that are not right", "Lower LEARNING_RATE, or set ENTROPY_COEF=0.001"),
    Rule("critic", DOUBT, LIKELY, "The critic explains nothing of the returns.", _critic,
         "the critic has not learned", "Raise CRITIC_LEARNING_RATE, CRITIC_WARMUP_STEPS"),
    Rule("teacher", DOUBT, LIKELY, "The teacher finds nearly all of the policy's tokens unlikely.", _teacher,
         "teacher and policy have other tokens, templates or prompts",
         "Compare both tokenizers and chat templates; see TEACHER_MODEL"),
)  # fmt: skip
"""All rules."""
