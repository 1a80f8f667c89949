"""Publishing of policy versions: from the trainer's shards into every rollout worker, verified by version.

All ranks write a version to the shared volume, where workers that start or missed it find it. Then rank 0 has every
registered worker serve it, from that directory, by the weights that rank 0 sends (PUBLISH_TRANSPORT=broadcast), or out
of memory that it shares with them (local).
"""
