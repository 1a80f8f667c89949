"""The GRPO trainer: the algorithm in grpo.py, its settings in config.py, the steps in loop.py."""
