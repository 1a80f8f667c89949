"""The data-server: prompts with their ground truths, from a generator, a file or the Hugging Face hub.

``app`` has the routes. ``sources`` finds the rows (``arithmetic`` makes them up), ``prompts`` makes what the model sees
of them, ``catalogue`` keeps it, ``order`` says which comes when, ``fingerprint`` says which prompts these are, and
``state`` remembers where consumers stand.
"""
