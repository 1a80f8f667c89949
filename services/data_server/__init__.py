"""The data-server: prompts with their ground truths, from a generator, a file or the Hugging Face hub.

``app`` has the routes, and ``batches`` what they answer. ``dataset`` is loaded from ``sources`` (rows, which
``arithmetic``, ``reasoning`` and ``seeds`` can generate), ``prompts`` (what the model sees of a row) and ``catalogue``
(prompts once rendered). ``order`` shuffles each epoch, and ``state`` keeps the cursors of consumers.
"""
