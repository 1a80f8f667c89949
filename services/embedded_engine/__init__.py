"""The engine for machines without a GPU: the part of SGLang's HTTP contract that we use, on torch alone.

    app.py        the application, and the routes of SGLang that generate and inform
    control.py    the routes that pause generation and change weights
    openai_routes.py, openai_wire.py, openai_replies.py, tool_calls.py   OpenAI's chat and text completions
    wire.py       what those routes take and give
    served.py     what all routes work on
    engine.py     the thread that runs the model: what is asked from outside, pauses, weight changes
    batch.py      the sequences that run and wait: letting in, decoding, ending
    sequences.py  requests and sequences as the engine sees them
    loading.py    loads a model with its tokenizer and settings
    model.py      the transformer: prefill of packed prompts, decoding of a whole batch
    weights.py    model directories: which tensors there must be, and how they are read and checked
    broadcast.py  weights that arrive by broadcast
    linear.py     linear layers whose results do not depend on what else is in the batch
    cache.py      keys and values of running sequences, in bounded memory
    sampling.py   seeded sampling and log-probabilities

One decoding step computes one token of every running sequence. Requests join and leave between steps.
"""
