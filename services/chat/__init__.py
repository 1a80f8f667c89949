"""Conversations with a model: its tokenizer, the messages of its chat template, the tool calls in its text."""
