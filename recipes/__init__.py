"""Reference recipes for GPUs: settings with published results, and their tasks that are not built in."""
