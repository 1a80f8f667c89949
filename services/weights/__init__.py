"""The transport of weights to rollout workers: policy versions on the shared volume, and the broadcast group."""
