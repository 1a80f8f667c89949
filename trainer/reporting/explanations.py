"""The form of an explained step, and of steps that were computed again; needs no torch."""

from __future__ import annotations

from pydantic import BaseModel

from trainer.reporting.group_records import Computation


class Difference(BaseModel):
    """A number, or a tensor of a checkpoint, that was computed differently."""

    name: str
    recorded: float | None = None
    recomputed: float | None = None
    """A tensor's numbers are those at the first place that differs."""
    elements: int | None = None
    """The elements of a tensor that differ, on the first rank with any."""
    largest: float | None = None
    """Their largest distance."""


class Silence(BaseModel):
    """Trained tokens of an update by what the loss did to them; a token counts once for each optimizer step."""

    tokens: int = 0
    clip: int = 0
    """Without a gradient, because their ratio is outside the bounds of LOSS."""
    cap: int = 0
    """Without a gradient, because IMPORTANCE_CORRECTION rejects them."""
    mask: int = 0
    """Without a gradient, because OFF_POLICY_MAX_KL leaves out their completion."""
    bounded: int = 0
    """With a gradient that a clip or IMPORTANCE_CAP bounds."""

    def __add__(self, other: Silence) -> Silence:
        mine, theirs = self.model_dump(), other.model_dump()
        return Silence(**{name: mine[name] + theirs[name] for name in mine})


class CompletionReport(BaseModel):
    """A completion: its reward, and its log-probability before and after the update."""

    reward: float | None
    advantage: float
    """The mean over its trained tokens."""
    tokens: int
    before: float
    """The sum over the trained tokens under the weights before the update, at TEMPERATURE."""
    after: float
    silence: Silence
    text: str

    @property
    def change(self) -> float:
        """The change of the log-probability by the update."""
        return self.after - self.before


class GroupReport(BaseModel):
    """A group: its gradient, the versions that sampled it, and its completions."""

    group_id: str
    source: str
    prompt: str
    is_replayed: bool
    weight: float
    versions: dict[int, int]
    """Trained tokens by the policy version that sampled them."""
    grad_norm: float
    """The norm of its part of the gradient, at the weights before the update."""
    share: float
    """The projection of this part on the whole gradient; the shares of all groups sum to 1."""
    completions: list[CompletionReport]


class SourceReport(BaseModel):
    """The gradient of all groups of a source."""

    source: str
    groups: int
    grad_norm: float
    share: float


class Ratio(BaseModel):
    """A trained token whose probability before the update differs much from that with which it was sampled."""

    ratio: float
    group_id: str
    completion: int
    place: int
    """The place of the token in its completion."""
    version: int
    before: str
    """The text before the token."""
    token: str


class Compared(BaseModel):
    """Steps that were computed again, and where they first differ from the run."""

    first: int
    last: int
    begin: str = ""
    """The checkpoint from which they were computed, or the model with which the run began."""
    metrics: int = 0
    """Numbers of metrics.jsonl that were compared."""
    tensors: int | None = None
    """Tensors of the checkpoint after the last step that were compared; None without this checkpoint."""
    step: int | None = None
    """The first step that differs; None if all are equal to the bit."""
    differences: list[Difference] = []
    """The differences in that step: its metrics, or the tensors of the checkpoint."""
    then: Computation | None = None
    """The machine and software that computed these steps in the run."""
    now: Computation | None = None
    """The machine and software that computed them again."""
    reason: str | None = None
    """Why the steps could not be compared."""


class Explanation(BaseModel):
    """A step, explained."""

    run: str
    step: int
    policy_version: int
    compared: Compared
    metrics: dict[str, float]
    """The metrics of the update, as they were computed now."""
    max_grad_norm: float
    loss: str
    silence: Silence
    without_advantage: int
    """Trained tokens whose advantage is 0."""
    versions: dict[int, int]
    sources: list[SourceReport]
    groups: list[GroupReport]
    """The largest gradient first."""
    ratios: list[Ratio]
