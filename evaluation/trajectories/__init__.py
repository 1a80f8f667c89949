"""Episodes of policies in environments, written to Parquet files: the code of ``grpo trajectories``."""
