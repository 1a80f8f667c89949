"""The engine for machines without a GPU: the part of SGLang's HTTP contract that we use, on torch alone.

    app.py        the routes of SGLang that clients, the router and the trainer call
    wire.py       what those routes take and give
    engine.py     the thread that runs the model: admission, decoding steps, pauses, weight changes
    sequences.py  requests and sequences as the engine sees them
    model.py      the transformer: prefill of packed prompts, decoding of a whole batch
    weights.py    model directories: which tensors there must be, and how they are read and checked
    linear.py     linear layers whose results do not depend on what else is in the batch
    cache.py      keys and values of running sequences, in bounded memory
    sampling.py   seeded sampling and log-probabilities

One decoding step computes one token of every running sequence. Requests join and leave between steps.
"""
