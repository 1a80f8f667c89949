"""Reference recipes for GPUs: settings with published results, and the tasks that are no built-in ones."""
