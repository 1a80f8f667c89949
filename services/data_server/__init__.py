"""The data-server: prompts with their ground truths, from a generator, a file or the Hugging Face hub.

``app`` has the routes, and ``batches`` what they answer: prompts from a cursor on, in the order that ``order`` gives
each epoch. ``dataset`` makes prompts of the rows of ``dataset_rows``, which come from ``generators`` or ``tables``.
"""
