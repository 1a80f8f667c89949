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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, Field

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

T = TypeVar("T")
Answers = NDArray[np.float64]
"""Log-probabilities of the fixed text's tokens but the first, [N]."""
Sums = Mapping[str, Mapping[str, str]]
"""An engine's checksums by rank and name."""
Digests = Mapping[str, Sequence[str]]
"""The trainer's digests of a version by name; the last of each is of the narrowest type."""
_FUSED = (
    # Image checkpoints of Qwen3.5, and of Gemma 4
    (re.compile(r"^model\.language_model\."), "model."),
    (re.compile(r"^model\.language_model\."), "language_model."),
    # Most families
    (re.compile(r"\.experts\.\d+\.(gate|up)_proj\."), ".experts.w13_"),
    (re.compile(r"\.experts\.\d+\.down_proj\."), ".experts.w2_"),
    (re.compile(r"\.[qkv]_proj\."), ".qkv_proj."),
    (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj."),
    # gpt-oss, and Gemma 4, whose experts are in another module
    (re.compile(r"\.experts\.gate_up_proj(_bias)?$"), r".experts.w13_weight\1"),
    (re.compile(r"\.experts\.down_proj(_bias)?$"), r".experts.w2_weight\1"),
    (re.compile(r"\.experts\."), ".moe.experts."),
    (re.compile(r"\.router\.per_expert_scale$"), ".moe.per_expert_scale"),
    # Granite 4 and LFM2
    (re.compile(r"\.input_linear\."), ".experts.w13_"),
    (re.compile(r"\.output_linear\."), ".experts.w2_"),
    (re.compile(r"\.router\.layer\."), ".gate."),
    (re.compile(r"\.conv\.conv\.weight$"), ".conv.conv_weight"),
    # Qwen3-Next and Qwen3.5
    (re.compile(r"\.in_proj_(qkv|z)\."), ".in_proj_qkvz."),
    (re.compile(r"\.in_proj_[ab]\."), ".in_proj_ba."),
    (re.compile(r"\.self_attn\."), "."),
)
"""The names of parts in a checkpoint, and of SGLang's tensors that fuse or rename them; several may apply. `A_log` of
Mamba-2 is not among them, because not every change of it reaches its exponential, which SGLang keeps."""
_SHIFTED = {"gemma": "norm.weight"}
"""The end of the names of tensors to which SGLang adds 1, in their own type, by type of model."""


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
        self.record: dict[str, Any] = {"time": time.time(), "worker": url, "confirmed": version}
        self.record |= {"served": served, "tensors": [*tensors], "reason": what}
        super().__init__(sentence(self.record))


def sentence(record: Mapping[str, Any]) -> str:
    """Return in words what a failed proof has found."""
    served, names = record["served"], record["tensors"]
    which = "" if served is None else f"; version {served} is served"
    which = "; the model without its adapter is served" if served == MODEL_ALONE else which
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    differing = f": {', '.join(names[:NAMED])}{more}" if names else ""
    return f"worker {record['worker']} confirms version {record['confirmed']}{which} ({record['reason']}{differing})"


class Evidence(BaseModel):
    """The trainer's facts about the versions that it has published; launchers read them in a version's directory."""

    token_ids: list[int] = []
    """The fixed text."""
    answers: dict[int, list[float]] = {}
    """The trainer's answers by version."""
    digests: dict[int, dict[str, list[str]]] = {}
    """By version and name the digest of each tensor, and of its value rounded to bfloat16 where that differs."""
    with_zeros: set[str] = Field(set(), exclude=True)
    """The tensors of the first version that have zeros, whose sign the dither of rounding may change."""
    noise: float = 0.0
    """The largest root mean square of the difference between the answers of a worker and the trainer; 0: not known."""

    def write(self, version: int, directory: Path) -> None:
        """Write the facts of a version into its directory."""
        digests = {version: self.digests[version]} if version in self.digests else {}
        own = self.model_copy(update={"answers": self.answers.copy(), "digests": digests})
        atomic_write(directory / PROOF_FILE, own.model_dump_json())

    @classmethod
    def read(cls, directory: Path) -> Evidence:
        """Return the facts in a version's directory; none if there are none."""
        try:
            return cls.model_validate_json((directory / PROOF_FILE).read_bytes())
        except FileNotFoundError:
            return cls()

    def prove_by_name(self, url: str, version: int, found: Mapping[str, str]) -> None:
        """Compare an engine's digests, by the checkpoint's names, with the trainer's.

        Raises:
            UnprovenError: some differ.
        """
        if wrong := _differing(self.digests[version], found):
            served = next((other for other, own in [*self.digests.items()] if not _differing(own, found)), None)
            what = f"{len(wrong)} of {len(self.digests[version])} tensors differ"
            raise UnprovenError(url, version, what, served, wrong)


def remember(facts: dict[int, T], version: int, fact: T, most: int) -> None:
    """Note a fact about a version, and forget those of others but the first and the newest ``most``."""
    facts[version] = fact
    for old in sorted(facts.keys() - {MODEL_ALONE, FIRST_VERSION})[:-most]:
        del facts[old]


def _differing(digests: Mapping[str, Sequence[str]], found: Mapping[str, str]) -> list[str]:
    """Return the names of tensors that an engine lacks, has besides, or computes with other values of."""
    return [name for name in {**digests, **found} if found.get(name) not in digests.get(name, ())]


def changed(before: Sums, after: Sums) -> set[str]:
    """Return the names of tensors whose checksums differ in some rank."""
    ranks = [(before.get(rank, {}), after.get(rank, {})) for rank in before.keys() | after.keys()]
    return {name for old, new in ranks for name in old.keys() | new.keys() if old.get(name) != new.get(name)}


def unlike_the_change(
    before: Sums, after: Sums, old: Digests, new: Digests, *, is_quantized: bool, kind: str = ""
) -> list[str]:
    """Return the tensors that an engine has changed though the trainer has not, or has kept though the trainer has not.

    Args:
        before: SGLang's checksums of the version before.
        after: those of the new version.
        old: the trainer's digests of the version before.
        new: those of the new version.
        is_quantized: a change may vanish in the engine's type.
        kind: the model's ``model_type``.
    """
    there = names_of(after)
    names = {name: fused(name, there) for name in new}
    may = {names[name] for name in new if new[name] != old.get(name)}
    must = {names[name] for name in new if name in old and new[name][-1] != old[name][-1]}
    differing = changed(before, after)
    wrong = (differing & {*names.values()}) - may
    if not is_quantized:
        end = _SHIFTED.get(kind)
        wrong |= {name for name in must & there if end is None or not name.endswith(end)} - differing
    return sorted(wrong | ({"every tensor"} if must and not differing else set()))


def names_of(sums: Sums) -> set[str]:
    """Return the names of the tensors of all ranks."""
    return {name for rank in sums.values() for name in rank}


def fused(name: str, there: Collection[str]) -> str:
    """Return SGLang's name of a checkpoint's tensor, which may be a part of a fused one; its own if none is there."""
    names = [name]
    for part, whole in () if name in there else _FUSED:
        renamed = [part.sub(whole, each) for each in names if part.search(each)]
        if found := [each for each in renamed if each in there]:
            return found[0]
        names += renamed
    return name


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
    own: Answers, version: int, remembered: Mapping[int, Sequence[float]], usual: Answers, noise: float
) -> Verdict:
    """Return the version that an engine serves, by its answers.

    Each other version whose answers differ from the confirmed one's by NOISE_FACTOR times the noise is compared: the
    engine's share of the change, by least squares, is 1 for the confirmed version and 0 for the other.

    Args:
        own: the engine's answers.
        version: the version that it confirms.
        remembered: the trainer's answers by version, this one's included.
        usual: the engine's difference from the trainer at a version that it certainly served, which is taken off.
        noise: the root mean square of the difference between engine and trainer with the same weights.
    """
    answers = {other: np.array(values) for other, values in [*remembered.items()]}
    expected, clean, least = answers.pop(version), own - usual, NOISE_FACTOR * noise
    changes = {other: expected - old for other, old in answers.items() if size(expected - old) > least}
    shares = {other: float(by @ (clean - answers[other]) / (by @ by)) for other, by in changes.items()}
    wrong = [other for other, share in shares.items() if share < LEAST_SHARE]
    difference = float(np.abs(own - expected).mean())
    served: int | None = version
    if wrong:
        served = min(wrong, key=lambda other: size(clean - answers[other]))
    elif not difference <= max(TOLERANCE, least):
        served = None
    return Verdict(served, difference, min(shares.values(), default=None), least)


def size(values: Answers) -> float:
    """Return the root mean square of answers."""
    return float(np.sqrt(np.square(values).mean()))


async def answer(engine: Engine, evidence: Evidence, *, by_adapter: bool) -> Answers:
    """Return an engine's answers to the fixed text, with the adapter or by the model alone.

    Raises:
        WorkerRefusedError, DependencyLostError: it gave none.
    """
    return np.array(await engine.rescore(evidence.token_ids, ADAPTER_NAME if by_adapter else None))


async def difference(engine: Engine, version: int, evidence: Evidence) -> Answers:
    """Return by how much an engine's answers by the model alone differ from the trainer's of a version."""
    found: Answers = await answer(engine, evidence, by_adapter=False) - np.array(evidence.answers[version])
    return found


async def prove(engine: Engine, version: int, evidence: Evidence, *, is_adapter: bool) -> None:
    """Prove the version of an engine that its launcher has brought up to date, as far as the evidence goes.

    Raises:
        UnprovenError: it serves something else.
        WorkerRefusedError, DependencyLostError: the engine did not answer.
    """
    if version in evidence.digests and engine.hashes_checkpoint:
        evidence.prove_by_name(engine.url, version, *(await engine.checksums()).values())
    elif version in evidence.answers and (is_adapter or (evidence.noise and not await engine.is_quantized())):
        own = await answer(engine, evidence, by_adapter=is_adapter)
        usual = await difference(engine, MODEL_ALONE, evidence) if is_adapter else np.zeros_like(own)
        noise = size(usual) if is_adapter else evidence.noise
        judge(own, version, evidence.answers, usual, noise).check(engine.url, version)


def note_refusal(directory: Path, error: UnprovenError) -> None:
    """Leave a failed proof in the version's directory, where the trainer finds it."""
    name = REFUSED_FILES.replace("*", uuid.uuid4().hex)
    atomic_write(directory / name, orjson.dumps(error.record))
