"""The local runner: the tasks of jobgroup.yaml as processes on one machine, for development, demos and tests."""
