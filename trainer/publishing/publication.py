"""The publication of a step's policy as the driver does it, with the probe of what the workers compute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from services.core.logs import get_logger
from trainer.algorithm.packing import TrainingGroup, TrainingSequence
from trainer.config import TrainerSettings
from trainer.main_rank import MainRank
from trainer.model.micro_batching import unknown_ids
from trainer.publishing.adapter_probe import PROBE_TEXT, PROBE_TOKENS, AdapterProbe
from trainer.publishing.probe import probe_workers
from trainer.rollouts.batch import Batch
from trainer.team import Team

log = get_logger(__name__)


@dataclass
class Publication:
    """Publishes policy versions; on rank 0."""

    settings: TrainerSettings
    services: MainRank
    team: Team
    _adapter_probe: AdapterProbe | None = field(default=None, init=False)

    def publish(self, version: int, batch: Batch) -> dict[str, float]:
        """Make the rollout workers serve the policy as ``version``; return the metrics of it.

        Args:
            version: the policy version.
            batch: groups, one completion of which PUBLISH_PROBE compares; empty before the first step.
        """
        if self.settings.engine_sleeps:
            self.team.leave_gpu()  # engines that wake for the version take their memory of the same GPU back
        metrics = self.team.publish(version)
        if self.settings.lora_rank:
            metrics |= self._probe_adapters()
        elif self.settings.publish_probe:
            metrics |= self._probe(batch)
        if self.settings.engine_sleeps:
            self.team.leave_gpu()  # the probes have gathered the parameters
        return metrics

    def keep_on_volume(self, version: int) -> None:
        """Write the policy again if the shared volume has lost it, because a worker that comes back waits for it."""
        if not self.team.publisher.is_on_volume(version):
            log.warning("policy version is written again", policy_version=version, reason="it has gone from the volume")
            self.team.write_policy(version)

    def _probe(self, batch: Batch) -> dict[str, float]:
        group = next(self._probes(batch), None)
        if group is None:
            return {}
        (expected,) = self.team.logprobs([group], temperature=1.0)[0]
        probing = probe_workers(self.settings, group.prompt_ids, group.sequences[0].completion_ids, expected)
        return {"probe_difference": self.services.thread.call(probing)}

    def _probes(self, batch: Batch) -> Iterator[TrainingGroup]:
        """Yield each completion of which the trainer computes log-probabilities, as a group without a loss mask."""
        vocabulary = self.team.learner.policy.config.vocab_size
        for group in batch.prepared(batch.groups):
            for sequence in group.sequences:
                probe = replace(group, sequences=[replace(sequence, loss_mask=None)])
                if sequence.completion_ids and not unknown_ids(probe, vocabulary):
                    yield probe

    def _probe_adapters(self) -> dict[str, float]:
        description = self.team.learner.policy.description
        assert description is not None, "rank 0 has it"
        token_ids = description.tokenizer.encode(PROBE_TEXT)[:PROBE_TOKENS]
        zeros = [0.0] * (len(token_ids) - 1)
        group = TrainingGroup(token_ids[:1], [TrainingSequence(token_ids[1:], zeros, zeros)])
        if self._adapter_probe is None:
            (model_alone,) = self.team.logprobs([group], temperature=1.0, use_adapters=False)[0]
            self._adapter_probe = AdapterProbe(self.settings, token_ids, model_alone)
        (expected,) = self.team.logprobs([group], temperature=1.0)[0]
        return self.services.thread.call(self._adapter_probe.check(expected))
