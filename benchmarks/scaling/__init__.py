"""Predictions: how long a step takes, where its seconds go, and how many nodes a model needs."""
