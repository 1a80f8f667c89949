"""``grpo launch``: a job group of a given size on a cluster."""
