"""Checkpoints, and the resumption of a run from the newest one."""
