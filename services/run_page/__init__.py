"""The run page: what a run directory holds, live on the trainer's port or opened later by ``scripts.view``."""
