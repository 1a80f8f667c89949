"""The data-server: prompts with their ground truths, from a generator, a file or the Hugging Face hub."""
