"""The engine for machines without a GPU: the part of SGLang's HTTP contract that this project uses, on torch alone.

    settings.py              the environment variables
    http/app.py              the application: loads the model and runs the engine
    http/state.py            the state that all routes share
    http/requests.py         sampling parameters, and requests for the engine
    http/sglang_routes.py    SGLang's routes that generate and inform
    http/weight_routes.py    SGLang's routes that pause generation and change weights
    http/adapter_routes.py   SGLang's routes that load and unload LoRA adapters
    http/openai_routes.py    OpenAI's chat and text completions; openai_requests.py and openai_replies.py have their
                             bodies, services/chat finds tool calls in a text
    compute/engine.py        the thread that runs the model: calls from outside, pauses, changes of weights
    compute/scheduler.py     running and queued sequences: admission and prefill, decode, preemption, ends
    compute/sequences.py     requests and sequences as the engine sees them
    compute/model.py         the transformer: prefill of packed prompts, decoding of a whole batch
    compute/adapters.py      LoRA adapters, read, checked, and computed beside the linear layers
    compute/kv_cache.py      keys and values of the running sequences, in bounded memory
    compute/sampling.py      seeded sampling and log-probabilities
    compute/loading.py       loads a model with its tokenizer
    compute/weights.py       model directories: the tensors of an architecture, read and checked
    compute/broadcast.py     weights that arrive by broadcast

One decode step computes one token of every running sequence. Requests join and leave between steps.
"""
