"""The two ways by which weights reach rollout workers: the shared volume and a broadcast group."""
