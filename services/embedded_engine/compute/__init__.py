"""The computation of the embedded engine: the model, its batch, its key-value cache and its weights."""
