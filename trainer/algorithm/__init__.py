"""GRPO as pure functions on tensors, and the batch that its loss is computed on."""
