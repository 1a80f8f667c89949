"""The transport of weights to rollout workers: versions on the shared volume, the broadcast group, shared memory."""
