"""GRPO post-training of language models; ``train`` runs a job group on this machine."""

from .local_runner.train import Run, RunError, train

__all__ = ["Run", "RunError", "train"]
