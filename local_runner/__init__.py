"""The local runner: a job group as processes on this machine."""
