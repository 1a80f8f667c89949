"""The proof of each publication that every worker computes with the version that it confirms.

Weights are proven while the engine is paused, so that no token comes of others. Then workers answer a fixed text. A
worker whose proof fails leaves the routing, and its launcher delivers the version again, with the same proof. A worker
that fails twice for a version ends the run, and so does a proof that all workers fail. services/engines/proof.py has
the comparisons.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson

from services.core.errors import ConfigurationError
from services.core.logs import get_logger
from services.core.tasks import in_background
from services.engines import proof
from services.engines.engine import Engine, WorkerRefusedError
from services.engines.proof import Answers, Sums, UnprovenError, Verdict
from services.weights.policy_store import FIRST_VERSION, PolicyStore
from trainer.algorithm.packing import TrainingGroup, text_group
from trainer.algorithm.training_groups import PerToken
from trainer.config import TrainerSettings
from trainer.model.micro_batching import unknown_ids
from trainer.model.policy import Policy
from trainer.publishing.writer import VersionWriter

log = get_logger(__name__)

TEXT = (
    "Tom has 12 apples and buys 7 more, so he has 12 + 7 = 19 apples. He gives 4 apples to each of his 3 friends, "
    "4 * 3 = 12 apples in all. Now 19 - 12 = 7 apples are left."
)
TOKENS = 64
"""Most tokens of the fixed text."""
PATIENCE_SECONDS = 5.0
"""Longest wait for the answers of a worker whose weights are proven."""
ANSWERS_EVERY = 32
"""Versions from one text to the next for workers whose every tensor is proven by name. The answers then say how far
trainer and engine are apart, and cost more than the digests."""
MOST_REFUSALS = 2
"""Failed proofs of a worker for one version that end the run."""
REMEDY = (
    "see the engine's log, and try another PUBLISH_TRANSPORT or ROLLOUT_ENGINE; started again, the run continues from "
    "its newest checkpoint"
)


@dataclass
class Known:
    """The facts about a worker that its next proof needs."""

    usual: Answers | None = None
    """The difference of its answers from the trainer's at the last version that it certainly served."""
    noise: float = 0.0
    """The root mean square of the first such difference."""
    first: Sums = field(default_factory=dict)
    """Its checksums with MODEL_NAME's own weights."""
    version: int | None = None
    """The last version with checksums of its own layout; None: none yet."""
    sums: Sums = field(default_factory=dict)
    """Those checksums."""
    before: Sums = field(default_factory=dict)
    """Those before this publication, if it has been compared with them."""
    is_proven: bool = False
    """Its checksums prove this publication."""


class Prover:
    """The proofs of versions by the evidence that the writer collects; on rank 0."""

    def __init__(self, settings: TrainerSettings, writer: VersionWriter) -> None:
        self.refusals: list[dict[str, Any]] = []
        """The failed proofs since the process began, oldest first, as ``UnprovenError.record`` describes them."""
        self._writer = writer
        self._evidence = writer.evidence
        self._is_adapter = settings.lora_rank > 0
        self._store = PolicyStore(settings.policy_dir)
        self._counts: Counter[tuple[str, int]] = Counter()
        self._read = {*settings.policy_dir.glob(f"v*/{proof.REFUSED_FILES}")}
        """Launchers' refusals that have been counted, by this process or one before it."""
        self._workers: defaultdict[str, Known] = defaultdict(Known)
        """By URL."""
        self._pause = 0.0
        """Longest time for which checksums were computed in a worker's pause."""
        self._needs_answers = True
        """Not every worker was proven by name at the last publication; True before the first."""
        self.difference = 0.0
        """The newest ``probe_difference``; 0: not known."""

    def remember(self, version: int, policy: Policy, logprobs: Callable[..., list[PerToken]]) -> None:
        """Compute the answers to the fixed text of a version that will be published, if they prove it or are due.

        A collective if ``logprobs`` is one.

        Args:
            version: the version of the policy's weights.
            policy: the policy in training.
            logprobs: computes log-probabilities on all ranks; see Learner.logprobs.
        """
        evidence = self._evidence
        if not (self._needs_answers or self._is_adapter or version % ANSWERS_EVERY == 0):
            return
        self._needs_answers = False
        if not evidence.token_ids:
            assert policy.description is not None, "rank 0 has it"
            context = getattr(policy.config, "max_position_embeddings", None) or TOKENS + 1
            evidence.token_ids = policy.description.tokenizer.encode(TEXT)[: min(TOKENS, context - 1)]
        for each in [proof.MODEL_ALONE, version] if self._is_adapter else [version]:
            if each not in evidence.answers:
                text = text_group(evidence.token_ids)
                (own,) = logprobs([text], temperature=1.0, use_adapters=each != proof.MODEL_ALONE)[0]
                proof.remember(evidence.answers, each, own.tolist(), proof.REMEMBERED)

    async def look(self, version: int, engine: Engine) -> None:
        """Ask an engine before a publication what it computes with, if it has MODEL_NAME's own weights until then.

        Raises:
            WorkerRefusedError, DependencyLostError: it does not say so.
        """
        known, is_first = self._workers[engine.url], version == FIRST_VERSION and self._writer.is_exact
        if not is_first or self._is_adapter or known.first or await engine.is_asleep():
            return
        if await engine.version() == FIRST_VERSION:
            if FIRST_VERSION in self._evidence.answers:
                # The noise of the engine's own type and kernels, whatever the publication does.
                self._note(known, await proof.difference(engine, FIRST_VERSION, self._evidence))
            known.first = await self._checksums(engine)

    async def check_weights(self, version: int, engine: Engine) -> None:
        """Prove the weights of an engine that is paused, as far as its checksums go.

        Raises:
            UnprovenError: the engine has not got the version.
            WorkerRefusedError, DependencyLostError: it gave no checksums though it could.
        """
        started, known, evidence = time.perf_counter(), self._workers[engine.url], self._evidence
        await in_background(self._writer.wait_for_digests)
        sums = await self._checksums(engine)
        if sums and engine.hashes_checkpoint:
            evidence.prove_by_name(engine.url, version, *sums.values())
            known.is_proven = True
        elif sums:
            await self._compare_with_before(version, engine, sums)
        self._needs_answers |= not engine.hashes_checkpoint
        if version == FIRST_VERSION and sums and known.first:
            names = proof.changed(known.first, sums)
            if zeros := evidence.with_zeros:
                # Under a name of the engine's own, a tensor may be one of those.
                there = proof.names_of(sums)
                names &= {proof.fused(name, there) for name in evidence.digests[version]}
                names -= {proof.fused(name, there) for name in zeros}
            if names:
                what = "the first publication has changed tensors, though its weights are MODEL_NAME's own"
                raise UnprovenError(engine.url, version, what, None, sorted(names))
        self._pause = max(self._pause, time.perf_counter() - started)

    async def _compare_with_before(self, version: int, engine: Engine, sums: Sums) -> None:
        """Compare how checksums of an engine's own layout have changed with how the trainer's digests have."""
        digests, known = self._evidence.digests, self._workers[engine.url]
        if known.version in digests:
            is_quantized = await engine.is_quantized()
            old, new = digests[known.version], digests[version]
            kind = self._writer.policy.config.model_type
            if wrong := proof.unlike_the_change(known.sums, sums, old, new, is_quantized=is_quantized, kind=kind):
                what = f"its tensors have not changed as the trainer's have since version {known.version}"
                raise UnprovenError(engine.url, version, what, known.version if sums == known.sums else None, wrong)
            known.before = known.sums
        known.is_proven = known.version in digests or sums == known.first
        known.version, known.sums = version, sums

    def unlike_others(self, version: int) -> dict[str, UnprovenError]:
        """Return by URL an error for each engine that has other checksums than most that it was equal to before."""
        alike: defaultdict[bytes, dict[str, Sums]] = defaultdict(dict)
        for url, known in self._workers.items():
            if known.before:
                alike[_dumped(known.before)][url] = known.sums
                known.before = {}
        found = {}
        for engines in alike.values():
            counts = Counter(map(_dumped, engines.values()))
            [(common, number)] = counts.most_common(1)
            usual = next(sums for sums in engines.values() if _dumped(sums) == common)
            for url, sums in engines.items():
                if sums != usual or 2 * number <= len(engines) != number:
                    what = (
                        f"it differs from {len(engines) - counts[_dumped(sums)]} engines to which it was equal before"
                    )
                    found[url] = UnprovenError(url, version, what, None, sorted(proof.changed(usual, sums)))
        return found

    async def _checksums(self, engine: Engine) -> Sums:
        """Return an engine's checksums; none if it has none."""
        try:
            return await engine.checksums()
        except WorkerRefusedError as error:
            if engine.hashes_checkpoint:
                raise
            log.info("an engine has no checksums, so its answers to a fixed text are compared", reason=str(error))
            return {}

    async def check_answers(self, version: int, engine: Engine) -> Verdict | None:
        """Compare an engine's answers to the fixed text with the trainer's of all remembered versions.

        Raises:
            UnprovenError: they are those of another version, and no digests prove this one.
            WorkerRefusedError, DependencyLostError: it gave none.
        """
        evidence, known = self._evidence, self._workers[engine.url]
        if version not in evidence.answers:
            return None
        if self._is_adapter and known.usual is None:
            self._note(known, await proof.difference(engine, proof.MODEL_ALONE, evidence))
        # A busy engine may be slow to answer, for which a worker whose weights are proven keeps nobody waiting.
        try:
            async with asyncio.timeout(PATIENCE_SECONDS if known.is_proven else None):
                own = await proof.answer(engine, evidence, by_adapter=self._is_adapter)
        except (TimeoutError, WorkerRefusedError):
            if known.is_proven:
                return None
            raise
        off = own - np.array(evidence.answers[version])
        usual = known.usual
        if usual is None:
            self._note(known, off)
            if await engine.is_quantized():
                return None  # Nothing says how far its type is off.
            usual = np.zeros_like(off)
        verdict = proof.judge(own, version, evidence.answers, usual, max(known.noise, proof.size(usual)))
        if not known.is_proven or self._is_adapter:
            verdict.check(engine.url, version)
        elif verdict.served != version:
            # Its weights are right, so that another version's answers come of how either side computes.
            log.warning("a worker has the right weights and other answers", url=engine.url, **vars(verdict))
        # Noise grows with what a model learns, and launchers judge by it, too.
        known.usual = off
        evidence.noise = max(evidence.noise, proof.size(off))
        return verdict

    def _note(self, known: Known, usual: Answers) -> None:
        """Note by how much the answers of a worker differ that certainly serves the version."""
        known.usual, known.noise = usual, proof.size(usual)
        self._evidence.noise = max(self._evidence.noise, known.noise)

    def metrics(self, verdicts: Sequence[Verdict], refused: int, seconds: float) -> dict[str, float]:
        """Return the metrics of a publication's proofs; ``seconds`` went by while workers answered the text."""
        shares = [(verdict.share, verdict.served) for verdict in verdicts if verdict.share is not None]
        found: dict[str, float | None] = {
            "workers_proven": sum(known.is_proven for known in self._workers.values()),
            "workers_refused": refused,
            "proof_seconds": self._pause + seconds,
            "probe_difference": max((verdict.difference for verdict in verdicts), default=None),
            "probe_delivered": min((share for share, _ in shares), default=None),
            "served_version": min((served for _, served in shares if served is not None), default=None),
        }
        self._pause = 0.0
        self.difference = found["probe_difference"] or self.difference
        for known in self._workers.values():
            known.is_proven = False
        return {name: float(value) for name, value in found.items() if value is not None}

    def refuse(self, errors: Sequence[UnprovenError], version: int, *, are_all: bool = False) -> None:
        """Record failed proofs of a version, the trainer's and those that launchers have left.

        Raises:
            ConfigurationError: they are of all workers, or a worker has failed twice for the version.
        """
        records = [error.record for error in errors]
        # A volume that does not answer, or has pruned the version, is not asked again for these.
        with contextlib.suppress(OSError):
            for path in sorted({*self._store.path(version).glob(proof.REFUSED_FILES)} - self._read):
                self._read.add(path)
                records.append(orjson.loads(path.read_bytes()))
        for record in records:
            self._counts[record["worker"], version] += 1
            self._workers[record["worker"]] = Known(first=self._workers[record["worker"]].first)
            log.error(f"worker refused: {proof.sentence(record)}")
        self.refusals += records
        twice = [record for record in records if self._counts[record["worker"], version] >= MOST_REFUSALS]
        if records and (are_all or twice):
            who = "all workers fail" if are_all else "a worker fails twice"
            worst = proof.sentence((twice or records)[0])
            raise ConfigurationError(f"{who} the proof of a version: {worst}; {REMEDY}")


def _dumped(sums: Sums) -> bytes:
    return orjson.dumps(sums, option=orjson.OPT_SORT_KEYS)


# --- the parts of a mismatch -----------------------------------------------------------------------------------------

USUAL_KL = 0.05
"""Largest usual ``kl_behaviour`` of a step in bfloat16, or of stale tokens, in nats a token."""
EXACT_KL = 1e-6
"""The same of tokens that are not stale where trainer and engines compute in float32."""
EXACT_NOISE = 1e-4
"""Noise of a worker's answers below which both compute in float32."""
SPLIT_COMPLETIONS, SPLIT_TOKENS = 4, 512
"""Completions of a step that are scored again, and their longest length with the prompt."""


def is_unusual(kl: float, noise: float, staleness: float) -> bool:
    """Return whether a step's ``kl_behaviour`` is not what types and staleness explain; never without any noise."""
    return noise > 0 and kl > (EXACT_KL if noise < EXACT_NOISE and not staleness else USUAL_KL)


def to_score(groups: Sequence[TrainingGroup], vocab_size: int) -> list[TrainingGroup]:
    """Return a few completions of a step, each as a group of its own without a loss mask."""
    found: list[TrainingGroup] = []
    for group in groups:
        whole = replace(group, sequences=[group.sequences[0].model_copy(update={"loss_mask": None})])
        is_short = 0 < whole.sequences[0].tokens <= SPLIT_TOKENS - len(group.prompt_ids)
        if is_short and not len(unknown_ids(whole, vocab_size)):
            found.append(whole)
    return found[:SPLIT_COMPLETIONS]


def name_part(kl: float, residual: float, usual: float, staleness: float) -> tuple[str, str]:
    """Return the part of a step's mismatch that is wrong (numeric, stale or sampling), and what to do in a sentence.

    Args:
        kl: the step's ``kl_behaviour``, nats a token.
        residual: mean of |log pi_engine - log pi_trainer| over the step's completions, both with the newest version.
        usual: the same over the fixed text.
        staleness: the largest of a group, in versions.
    """
    start = f"kl_behaviour is {kl:.2g} nats a token; with the same version, engine and trainer differ by {residual:.2g}"
    if residual > max(proof.NOISE_FACTOR * usual, EXACT_NOISE):
        return "numeric", (
            f"{start} nats on its completions and by {usual:.2g} on the fixed text: compare the types in the lines "
            "`computing` of both logs, positions, packing and the model's configuration"
        )
    if staleness:
        return "stale", (
            f"{start} nats only, and its tokens are up to {staleness:g} versions old: lower MAX_STALENESS or "
            "LEARNING_RATE"
        )
    return "sampling", (
        f"{start} nats only, so its tokens are of another distribution than the one that is trained: compare "
        "TEMPERATURE, top-p, top-k and penalties, also those in generation_config.json, and the tokens of the chat "
        "template"
    )
