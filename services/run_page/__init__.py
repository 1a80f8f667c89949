"""The run page: the content of a run directory, live on the trainer's port or opened later by ``grpo view``."""
