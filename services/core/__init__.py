"""Settings, endpoints, errors, logs and helpers that every component uses."""
