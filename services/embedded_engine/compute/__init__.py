"""The computation of the embedded engine: model, scheduler, key-value cache, sampling and weights."""
