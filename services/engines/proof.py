"""The proof that an engine serves a policy version: digests of its weights, and its answers to a fixed text.

An engine confirms a version by repeating the number that its update named. So it is asked what it computes with.
Digests prove weights. The embedded engine's are those of the checkpoint's tensors, equal to the trainer's. SGLang's are
of its own layout; they must change exactly where the trainer's have changed, and be equal in engines that were equal
before.

The answers are an engine's log-probabilities of the text. The trainer remembers its own for each version, so that the
version whose answers fit is the one that is served. They are the only proof of adapters, which digests do not cover.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from services.core.files import atomic_write
from services.engines.engine import Engine, WorkerRefusedError
from services.weights.policy_store import ADAPTER_NAME, FIRST_VERSION

PROOF_FILE = "proof.json"
"""The facts by which a version is proven, in its directory."""
REFUSED_FILES = "refused-*.json"
"""Proofs that failed at a launcher, one file a proof, in the version's directory."""
MODEL_ALONE = -1
"""The version of the model without an adapter, among the answers."""
TOLERANCE = 0.1
"""Largest mean difference of an engine's answers from the trainer's, in nats, where nothing else can be compared. With
the same weights, other kernels in bfloat16 make 0.05."""
LEAST_SHARE = 0.5
"""An engine that shows less of the change between two versions does not serve the second."""
NOISE_FACTOR = 4.0
"""Two versions are told apart once their answers differ by this many times the noise. The share of the change that an
engine shows then has an error of a few percent."""
REMEMBERED = 64
"""Newest versions whose answers are remembered, besides the first one's."""
COMPARED = 8
"""The same of digests, which are some hundred times larger."""
NAMED = 3
"""Tensors that a sentence names."""

Answers = NDArray[np.float64]
"""Log-probabilities of the fixed text's tokens but the first, [N]."""
_FUSED = (
    (re.compile(r"\.experts\.\d+\.(gate|up)_proj\."), ".experts.w13_"),
    (re.compile(r"\.experts\.\d+\.down_proj\."), ".experts.w2_"),
    (re.compile(r"\.[qkv]_proj\."), ".qkv_proj."),
    (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj."),
)
"""The names of parts in a checkpoint, and of SGLang's tensors that fuse them."""


class UnprovenError(WorkerRefusedError):
    """A worker that confirms a version and computes with something else."""

    def __init__(self, url: str, version: int, what: str, served: int | None = None, tensors: Sequence[str] = ()):
        """Describe the failed proof.

        Args:
            url: the worker.
            version: the version that it confirms.
            what: the fault in words.
            served: the version that it serves, if that is known.
            tensors: the names of tensors that differ.
        """
        self.record: dict[str, Any] = {
            "time": time.time(),
            "worker": url,
            "confirmed": version,
            "served": served,
            "tensors": [*tensors],
            "reason": what,
        }
        super().__init__(sentence(self.record))


def sentence(record: Mapping[str, Any]) -> str:
    """Return in words what a failed proof has found."""
    served, names = record["served"], record["tensors"]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    which = {None: "", MODEL_ALONE: "; the model without its adapter is served"}.get(
        served, f"; version {served} is served"
    )
    differing = f": {', '.join(names[:NAMED])}{more}" if names else ""
    return f"worker {record['worker']} confirms version {record['confirmed']}{which} ({record['reason']}{differing})"


@dataclass
class Evidence:
    """The trainer's facts about the versions that it has published."""

    token_ids: list[int] = field(default_factory=list)
    """The fixed text."""
    answers: dict[int, list[float]] = field(default_factory=dict)
    """The trainer's answers by version."""
    digests: dict[int, dict[str, list[str]]] = field(default_factory=dict)
    """By version and name the digest of each tensor, and of its value rounded to bfloat16 where that differs."""
    with_zeros: set[str] = field(default_factory=set)
    """The tensors of the first version that have zeros, whose sign the dither of rounding may change."""
    noise: float = 0.0
    """The largest root mean square of the difference between the answers of a worker and the trainer; 0: not known."""

    def remember(self, version: int, answers: list[float]) -> None:
        """Keep the answers of a version, and forget old ones."""
        self.answers[version] = answers
        self._forget(self.answers, REMEMBERED)

    def note_digests(self, version: int, digests: dict[str, list[str]]) -> None:
        """Keep the digests of a version, and forget old ones."""
        self.digests[version] = digests
        self._forget(self.digests, COMPARED)

    def write(self, version: int, directory: Path) -> None:
        """Write the facts of a version for the launchers, which load it out of this directory."""
        content = {
            "token_ids": self.token_ids,
            "answers": {str(each): values for each, values in [*self.answers.items()]},
            "digests": {str(version): self.digests[version]} if version in self.digests else {},
            "noise": self.noise,
        }
        atomic_write(directory / PROOF_FILE, orjson.dumps(content))

    @classmethod
    def read(cls, directory: Path) -> Evidence:
        """Return the facts in a version's directory; none if there are none."""
        try:
            content = orjson.loads((directory / PROOF_FILE).read_bytes())
        except FileNotFoundError:
            return cls()
        answers, digests = (
            {int(key): value for key, value in content[name].items()} for name in ("answers", "digests")
        )
        return cls(content["token_ids"], answers, digests, noise=content["noise"])

    def served_by_digests(self, found: Mapping[str, str]) -> int | None:
        """Return the other version whose tensors these are, if one is remembered."""
        return next((v for v, own in [*self.digests.items()] if not differing(own, found)), None)

    @staticmethod
    def _forget(by_version: dict[int, Any], most: int) -> None:
        newest = sorted(version for version in by_version if version > FIRST_VERSION)
        for version in newest[:-most]:
            del by_version[version]


def differing(digests: Mapping[str, Sequence[str]], found: Mapping[str, str]) -> list[str]:
    """Return the names of tensors that an engine lacks, has besides, or computes with other values of."""
    names = dict.fromkeys([*digests, *found])
    return [name for name in names if name not in found or found[name] not in digests.get(name, ())]


def prove_by_name(url: str, version: int, evidence: Evidence, found: Mapping[str, str]) -> None:
    """Compare an engine's digests, by the checkpoint's names, with the trainer's.

    Raises:
        UnprovenError: some differ.
    """
    if wrong := differing(evidence.digests[version], found):
        what = f"{len(wrong)} of {len(evidence.digests[version])} tensors differ"
        raise UnprovenError(url, version, what, evidence.served_by_digests(found), wrong)


def unlike_the_change(
    before: Mapping[str, Mapping[str, str]],
    after: Mapping[str, Mapping[str, str]],
    old: Mapping[str, Sequence[str]],
    new: Mapping[str, Sequence[str]],
    *,
    is_quantized: bool,
) -> list[str]:
    """Return the tensors that an engine has changed though the trainer has not, or has kept though the trainer has not.

    Args:
        before: SGLang's checksums of the version before, by rank and name.
        after: those of the new version.
        old: the trainer's digests of the version before; the last of each is of the narrowest type.
        new: those of the new version.
        is_quantized: a change may vanish in the engine's type.
    """
    may = {fused(name) for name in new if new[name] != old.get(name)}
    must = {fused(name) for name in new if name in old and new[name][-1] != old[name][-1]}
    known = {fused(name) for name in new}
    names = {name for sums in after.values() for name in sums}
    changed = {name for rank, sums in after.items() for name in sums if sums[name] != before.get(rank, {}).get(name)}
    kept = set() if is_quantized else (must & names) - changed
    return sorted(((changed & known) - may) | kept | ({"every tensor"} if must and not changed else set()))


def fused(name: str) -> str:
    """Return SGLang's name of a checkpoint's tensor, which may be a part of a fused one."""
    for part, whole in _FUSED:
        name = part.sub(whole, name)
    return name


@dataclass(frozen=True)
class Reference:
    """The answers of trainer and engine to the same text, at a version that the engine certainly served."""

    trainer: Answers
    engine: Answers

    @property
    def noise(self) -> float:
        """The root mean square of their difference."""
        return _size(self.engine - self.trainer)


@dataclass(frozen=True)
class Verdict:
    """The finding about an engine's answers."""

    served: int | None
    """The version that fits; None if no remembered one does."""
    difference: float
    """The mean of |log pi_engine - log pi_trainer|, in nats a token."""
    share: float | None
    """The least share of a change between versions that the engine shows; None if no two can be told apart."""
    least_change: float
    """The smallest change of the answers that would have been told from the noise, in nats a token."""

    def check(self, url: str, version: int) -> None:
        """Raise UnprovenError unless the engine serves the version that it confirms."""
        if self.served != version:
            what = f"its answers to a fixed text differ from the trainer's by {self.difference:.2g} nats a token"
            raise UnprovenError(url, version, what, self.served)


def judge(
    own: Answers, version: int, remembered: Mapping[int, Sequence[float]], at: Reference, noise: float
) -> Verdict:
    """Return the version that an engine serves, by its answers.

    The engine's systematic difference from the trainer, as it was at the reference, is taken off. Each other version
    whose answers differ from the confirmed one's by NOISE_FACTOR times the noise is compared: the engine's share of the
    change, by least squares, is 1 for the confirmed version and 0 for the other.

    Args:
        own: the engine's answers.
        version: the version that it confirms.
        remembered: the trainer's answers by version, this one's included.
        at: answers at a version that it certainly served.
        noise: the root mean square of the difference between engine and trainer with the same weights.
    """
    expected = np.array(remembered[version])
    clean = own - (at.engine - at.trainer)
    least = NOISE_FACTOR * noise
    shares = {}
    for other, answers in remembered.items():
        change = expected - np.array(answers)
        if other != version and _size(change) > least:
            shares[other] = float(change @ (clean - np.array(answers)) / (change @ change))
    wrong = [other for other, share in shares.items() if share < LEAST_SHARE]
    served: int | None = version
    difference = float(np.abs(own - expected).mean())
    if wrong:
        served = min(wrong, key=lambda other: _size(clean - np.array(remembered[other])))
    elif not difference <= max(TOLERANCE, least):
        served = None
    return Verdict(served, difference, min(shares.values(), default=None), least)


async def answer(engine: Engine, evidence: Evidence, *, by_adapter: bool) -> Answers:
    """Return an engine's answers to the fixed text, with the adapter or by the model alone.

    Raises:
        WorkerRefusedError, DependencyLostError: it gave none.
    """
    return np.array(await engine.rescore(evidence.token_ids, ADAPTER_NAME if by_adapter else None))


async def alone(engine: Engine, evidence: Evidence) -> Reference:
    """Return the answers of trainer and engine by the model without an adapter."""
    return Reference(np.array(evidence.answers[MODEL_ALONE]), await answer(engine, evidence, by_adapter=False))


async def prove(engine: Engine, version: int, evidence: Evidence, *, is_adapter: bool) -> None:
    """Prove the version of an engine that its launcher has brought up to date, as far as the evidence goes.

    Raises:
        UnprovenError: it serves something else.
        WorkerRefusedError, DependencyLostError: the engine did not answer.
    """
    if version in evidence.digests and engine.hashes_checkpoint:
        [found] = (await engine.checksums()).values()
        prove_by_name(engine.url, version, evidence, found)
    elif version in evidence.answers and (is_adapter or (evidence.noise and not await engine.is_quantized())):
        expected = np.array(evidence.answers[version])
        at = await alone(engine, evidence) if is_adapter else Reference(expected, expected)
        own = await answer(engine, evidence, by_adapter=is_adapter)
        noise = at.noise if is_adapter else evidence.noise
        judge(own, version, evidence.answers, at, noise).check(engine.url, version)


def note_refusal(directory: Path, error: UnprovenError) -> None:
    """Leave a failed proof in the version's directory, where the trainer finds it."""
    name = REFUSED_FILES.replace("*", uuid.uuid4().hex)
    atomic_write(directory / name, orjson.dumps(error.record))


def _size(values: Answers) -> float:
    return float(np.sqrt(np.square(values).mean()))
