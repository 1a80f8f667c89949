"""The engine for machines without a GPU: the part of SGLang's HTTP contract that this project uses, on torch alone.

    http/app.py              the application: loads the model and runs the engine
    http/state.py            the state that all routes share
    http/requests.py         the bodies of SGLang's and OpenAI's routes, and the engine's requests made from them
    http/sglang_routes.py    SGLang's routes that generate and inform
    http/weight_routes.py    SGLang's routes that pause generation, change weights and load LoRA adapters
    http/openai_routes.py    OpenAI's chat and text completions; services/chat finds tool calls in a text
    compute/engine.py        the thread that runs the model: calls from outside, pauses, changes of weights
    compute/scheduler.py     running and queued sequences: admission and prefill, decode, preemption, ends
    compute/sequences.py     requests and sequences as the engine sees them
    compute/model.py         the transformer: prefill of packed prompts, decoding of a whole batch, mixtures of experts
    compute/attention.py     causal attention with the same result for a token, however many tokens are computed with it
    compute/adapters.py      LoRA adapters, read, checked, and computed next to the linear layers
    compute/kv_cache.py      keys and values of the running sequences, in bounded memory, and of prefixes to reuse
    compute/sampling.py      seeded sampling and log-probabilities
    compute/loading.py       loads a model with its tokenizer
    compute/weights.py       the tensors of an architecture, read from a directory or received by broadcast, and checked

One decode step computes one token of every running sequence. Requests join and leave between steps.
"""
