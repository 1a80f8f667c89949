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
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import orjson

from services.core.errors import ConfigurationError
from services.core.logs import get_logger
from services.core.tasks import in_background
from services.engines.engine import Engine, WorkerRefusedError
from services.engines.proof import (
    MODEL_ALONE,
    NOISE_FACTOR,
    REFUSED_FILES,
    Reference,
    UnprovenError,
    Verdict,
    alone,
    answer,
    fused,
    judge,
    prove_by_name,
    sentence,
    unlike_the_change,
)
from services.protocol.groups import TokenSequence
from services.protocol.rewards import FinishReason
from services.weights.policy_store import FIRST_VERSION, PolicyStore
from trainer.algorithm.packing import TrainingGroup
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
MOST_REFUSALS = 2
"""Failed proofs of a worker for one version that end the run."""
REMEDY = (
    "see the engine's log, and try another PUBLISH_TRANSPORT or ROLLOUT_ENGINE; started again, the run continues from "
    "its newest checkpoint"
)

Sums = dict[str, dict[str, str]]
"""Checksums by rank and name."""


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
        self._read = {*settings.policy_dir.glob(f"v*/{REFUSED_FILES}")}
        """Launchers' refusals that have been counted, by this process or one before it."""
        self._at: dict[str, Reference] = {}
        """The answers of each worker, by URL, at the last version that it certainly served."""
        self._noise: dict[str, float] = {}
        self._sums: dict[str, tuple[int, Sums]] = {}
        """The last version of each worker with checksums of its own layout, and these."""
        self._before: dict[str, Sums] = {}
        """The checksums before, of workers that this publication has changed."""
        self._first: dict[str, Sums] = {}
        """The checksums of workers that have MODEL_NAME's own weights."""
        self._proven: set[str] = set()
        """The workers whose checksums prove this publication."""
        self._pause = 0.0
        """Longest time for which they were computed in a worker's pause."""

    def remember(self, version: int, policy: Policy, logprobs: Callable[..., list[PerToken]]) -> None:
        """Compute the answers to the fixed text of a version that will be published. A collective.

        Args:
            version: the version of the policy's weights.
            policy: the policy in training.
            logprobs: computes log-probabilities on all ranks; see Learner.logprobs.
        """
        evidence = self._evidence
        if not evidence.token_ids:
            assert policy.description is not None, "rank 0 has it"
            context = getattr(policy.config, "max_position_embeddings", None) or TOKENS + 1
            evidence.token_ids = policy.description.tokenizer.encode(TEXT)[: min(TOKENS, context - 1)]
        ids, zeros = evidence.token_ids, [0] * (len(evidence.token_ids) - 1)
        tokens = TokenSequence(
            completion_ids=ids[1:], logprobs=zeros, policy_versions=zeros, finish_reason=FinishReason.LENGTH
        )
        group = TrainingGroup(ids[:1], [tokens])
        if self._is_adapter and MODEL_ALONE not in evidence.answers:
            (base,) = logprobs([group], temperature=1.0, use_adapters=False)[0]
            evidence.remember(MODEL_ALONE, base.tolist())
        if version not in evidence.answers:
            (own,) = logprobs([group], temperature=1.0)[0]
            evidence.remember(version, own.tolist())

    async def look(self, version: int, engine: Engine) -> None:
        """Ask an engine before a publication what it computes with, if it has MODEL_NAME's own weights until then.

        Raises:
            WorkerRefusedError, DependencyLostError: it does not say so.
        """
        is_first = version == FIRST_VERSION and not self._is_adapter and self._writer.is_exact
        if not is_first or engine.url in self._first or await engine.is_asleep():
            return
        if await engine.version() == FIRST_VERSION:
            if FIRST_VERSION in self._evidence.answers:
                # The noise of the engine's own type and kernels, whatever the publication does.
                expected = np.array(self._evidence.answers[FIRST_VERSION])
                self._note(engine.url, Reference(expected, await answer(engine, self._evidence, by_adapter=False)))
            self._first[engine.url] = await self._checksums(engine)

    async def check_weights(self, version: int, engine: Engine) -> None:
        """Prove the weights of an engine that is paused, as far as its checksums go.

        Raises:
            UnprovenError: the engine has not got the version.
            WorkerRefusedError, DependencyLostError: it gave no checksums though it could.
        """
        started, url = time.perf_counter(), engine.url
        await in_background(self._writer.wait_for_digests)
        sums = await self._checksums(engine)
        if sums and engine.hashes_checkpoint:
            prove_by_name(url, version, self._evidence, next(iter(sums.values())))
            self._proven.add(url)
        elif sums:
            await self._compare_with_before(version, engine, sums)
        if version == FIRST_VERSION and sums and (first := self._first.get(url)):
            pairs = [(before, sums.get(rank, {})) for rank, before in first.items()]
            changed = {name for before, after in pairs for name in before if before[name] != after.get(name)}
            if zeros := self._evidence.with_zeros:
                # Under a name of the engine's own, a tensor may be one of those.
                digests = self._evidence.digests[version]
                changed &= {*digests, *map(fused, digests)} - {*zeros, *map(fused, zeros)}
            if changed:
                what = "the first publication has changed tensors, though its weights are MODEL_NAME's own"
                raise UnprovenError(url, version, what, None, sorted(changed))
        self._pause = max(self._pause, time.perf_counter() - started)

    async def _compare_with_before(self, version: int, engine: Engine, sums: Sums) -> None:
        """Compare how checksums of an engine's own layout have changed with how the trainer's digests have."""
        digests, url = self._evidence.digests, engine.url
        before, old = self._sums.get(url, (None, {}))
        if before in digests:
            quantized = await engine.is_quantized()
            wrong = unlike_the_change(old, sums, digests[before], digests[version], is_quantized=quantized)
            if wrong:
                what = f"its tensors have not changed as the trainer's have since version {before}"
                raise UnprovenError(url, version, what, before if sums == old else None, wrong)
        if before in digests or self._first.get(url) == sums:
            self._proven.add(url)
        if before in digests:
            self._before[url] = old
        self._sums[url] = version, sums

    def unlike_others(self, version: int) -> dict[str, UnprovenError]:
        """Return by URL an error for each engine that has other checksums than most that it was equal to before."""
        alike: dict[bytes, dict[str, Sums]] = {}
        for url, old in self._before.items():
            alike.setdefault(_dumped(old), {})[url] = self._sums[url][1]
        self._before = {}
        found = {}
        for sums in alike.values():
            counts = Counter(map(_dumped, sums.values()))
            common, number = counts.most_common(1)[0]
            usual = next(each for each in sums.values() if _dumped(each) == common)
            for url, own in sums.items():
                if own != usual or 2 * number <= len(sums) != number:
                    wrong = {name for rank in usual for name in usual[rank] if own[rank].get(name) != usual[rank][name]}
                    what = f"it differs from {len(sums) - counts[_dumped(own)]} engines to which it was equal before"
                    found[url] = UnprovenError(url, version, what, None, sorted(wrong))
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
        url, evidence = engine.url, self._evidence
        if version not in evidence.answers:
            return None
        expected = np.array(evidence.answers[version])
        if self._is_adapter and url not in self._at:
            self._note(url, await alone(engine, evidence))
        # A busy engine may be slow to answer, for which a worker whose weights are proven keeps nobody waiting.
        try:
            async with asyncio.timeout(PATIENCE_SECONDS if url in self._proven else None):
                own = await answer(engine, evidence, by_adapter=self._is_adapter)
        except TimeoutError:
            return None
        except WorkerRefusedError:
            if url in self._proven:
                return None
            raise
        if url not in self._at:
            self._note(url, Reference(expected, own))
            if await engine.is_quantized():
                return None  # Nothing says how far its type is off.
        at = Reference(expected, expected) if self._at[url].engine is own else self._at[url]
        verdict = judge(own, version, evidence.answers, at, max(self._noise[url], at.noise))
        if url in self._proven and not self._is_adapter:
            # Its weights are right, so that another version's answers come of how either side computes.
            if verdict.served != version:
                log.warning("a worker has the right weights and other answers", url=url, **vars(verdict))
        else:
            verdict.check(url, version)
        # Noise grows with what a model learns, and launchers judge by it, too.
        self._at[url] = Reference(expected, own)
        evidence.noise = max(evidence.noise, self._at[url].noise)
        return verdict

    def _note(self, url: str, at: Reference) -> None:
        self._at[url], self._noise[url] = at, at.noise
        self._evidence.noise = max(self._evidence.noise, at.noise)

    def metrics(self, verdicts: Sequence[Verdict | None], refused: int, seconds: float) -> dict[str, float]:
        """Return the metrics of a publication's proofs; ``seconds`` went by while workers answered the text."""
        found = [verdict for verdict in verdicts if verdict is not None]
        shares = [verdict.share for verdict in found if verdict.share is not None]
        served = [verdict.served for verdict in found if verdict.served is not None and verdict.share is not None]
        metrics = {
            "workers_proven": float(len(self._proven)),
            "workers_refused": float(refused),
            "proof_seconds": self._pause + seconds,
            **({"probe_difference": max(verdict.difference for verdict in found)} if found else {}),
            **({"probe_delivered": min(shares)} if shares else {}),
            **({"served_version": float(min(served))} if served else {}),
        }
        self._proven, self._pause = set(), 0.0
        return metrics

    def refuse(self, errors: Sequence[UnprovenError], version: int, *, are_all: bool = False) -> None:
        """Record failed proofs of a version, the trainer's and those that launchers have left.

        Raises:
            ConfigurationError: they are of all workers, or a worker has failed twice for the version.
        """
        records = [error.record for error in errors]
        # A volume that does not answer, or has pruned the version, is not asked again for these.
        with contextlib.suppress(OSError):
            for path in sorted({*self._store.path(version).glob(REFUSED_FILES)} - self._read):
                self._read.add(path)
                records.append(orjson.loads(path.read_bytes()))
        for record in records:
            self._counts[record["worker"], version] += 1
            self._at.pop(record["worker"], None)
            self._sums.pop(record["worker"], None)
            self._proven.discard(record["worker"])
            log.error(f"worker refused: {sentence(record)}")
        self.refusals += records
        twice = [record for record in records if self._counts[record["worker"], version] >= MOST_REFUSALS]
        if records and (are_all or twice):
            who = "all workers fail" if are_all else "a worker fails twice"
            raise ConfigurationError(f"{who} the proof of a version: {sentence((twice or records)[0])}; {REMEDY}")


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
    start = f"kl_behaviour is {kl:.2g} nats a token;"
    if residual > max(NOISE_FACTOR * usual, EXACT_NOISE):
        return "numeric", (
            f"{start} with the same version, engine and trainer differ by {residual:.2g} nats on its completions "
            f"and by {usual:.2g} on the fixed text: compare the types in the lines `computing` of both logs, "
            "positions, packing and the model's configuration"
        )
    if staleness:
        return "stale", (
            f"{start} its tokens are up to {staleness:g} versions old, and with the same version engine and trainer "
            f"differ by {residual:.2g} nats only: lower MAX_STALENESS or LEARNING_RATE"
        )
    return "sampling", (
        f"{start} engine and trainer agree on its completions ({residual:.2g} nats), so their tokens are of another "
        "distribution than the one that is trained: compare TEMPERATURE, top-p, top-k and penalties, also those in "
        "generation_config.json, and the tokens of the chat template"
    )
