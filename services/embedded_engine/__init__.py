"""The engine for machines without a GPU: the part of SGLang's HTTP contract that this project uses, in torch.

    app.py            the application: loads the model, runs the engine, and has the routes of SGLang that generate,
                      inform and control, and OpenAI's chat completions
    requests.py       the state that all routes share, the bodies, and the engine's requests made from them
    weight_routes.py  SGLang's routes that change weights and load LoRA adapters
    engine.py         the thread that runs the model: calls from outside, pauses, changes of weights
    scheduler.py      requests, running and queued sequences: admission and prefill, decode, preemption, ends
    families.py       the families that model.py computes
    model.py          the transformer: prefill of packed prompts, decoding of a whole batch, attention, experts
    any_model.py      every other causal language model, by transformers' forward pass and cache
    adapters.py       LoRA adapters, read, checked, and computed next to the linear layers
    kv_cache.py       keys and values of the running sequences, in bounded memory, and of prefixes to reuse
    state_cache.py    the same for any_model.py: the states of the running sequences, and at the ends of prefixes
    sampling.py       seeded sampling and log-probabilities
    loading.py        loads a model with its tokenizer
    weights.py        the tensors of an architecture, read from a directory and checked

One decode step computes one token of every running sequence. Requests join and leave between steps.
"""
