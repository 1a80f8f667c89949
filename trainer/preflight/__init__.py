"""The preflight: a run's needs of GPUs, hosts and the volume, compared with what is there before a model is loaded."""
