"""The bytes that a run needs: ``needed`` is a pure function of the model's shape and of the work on it.

The terms follow what FSDP2, autograd and AdamW allocate: float32 shards of weights, gradients and two moments, and the
lower halves of rounded weights; the layers that are gathered at the time; the tensors that the backward pass reads
again; the logits of one chunk. Tests compare the sum with the allocations counted under FakeTensorMode, and with the
resident memory of the trainer on a CPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import compress, product

from trainer.capacity.shape import ModelShape
from trainer.config.sections import SELECTIVE_BUDGET, Checkpointing, RecordGroups
from trainer.model.micro_batching import KEYS_PER_TOKEN

GIB = 2**30

CUDA_CONTEXT = 2 * GIB
"""Memory of a GPU for CUDA's context, kernels, cuBLAS's workspace and NCCL's buffers."""
PROCESS_BYTES = 3 * GIB
"""Host memory of a rank with torch and CUDA loaded; a rank without a GPU takes PROCESSOR_PROCESS_BYTES."""
PROCESSOR_PROCESS_BYTES = GIB
SHM_BYTES = GIB
"""/dev/shm of a node with several GPUs, which NCCL's manual asks for."""
VERSIONS = 3
"""Published versions on the volume: two are kept, and one more while a worker loads it."""
MOMENTS = 2


@dataclass(frozen=True)
class EngineBeside:
    """An engine on GPUs of the trainer, which generates while the trainer waits."""

    gpus: int
    """GPUs over which it spreads its weights, keys and values."""
    tokens: int
    """ENGINE_MAX_TOTAL_TOKENS."""
    number_bytes: int = 2
    """Bytes of a number of its weights, keys and values."""
    keeps_weights: bool = False
    """True for an engine that keeps its weights on the GPU while it sleeps."""
    graph_bytes: int = 0
    """Bytes of CUDA graphs that it has in addition to those of ENGINE_ASLEEP, and keeps while it sleeps."""

    def weights(self, shape: ModelShape) -> int:
        """Return the bytes of its weights on each GPU."""
        return self.number_bytes * shape.parameters // self.gpus

    def asleep(self, shape: ModelShape) -> int:
        """Return the bytes that it keeps on each GPU while it sleeps."""
        return ENGINE_ASLEEP + self.graph_bytes + self.keeps_weights * self.weights(shape)

    def token_bytes(self, shape: ModelShape) -> int:
        """Return the bytes of the keys and values of a token on each GPU."""
        return 2 * self.number_bytes * shape.layers * shape.head_size * max(1, shape.kv_heads // self.gpus)


@dataclass(frozen=True)
class Work:
    """A run's use of a model, and the number of its ranks."""

    device: str
    """``cuda`` or ``cpu``."""
    nodes: int
    ranks_per_node: int
    replicas: int
    """Copies of the sharded state: 1 on a flat mesh, ``nodes`` on a mesh that shards within a node."""
    micro_batch_tokens: int
    """MICRO_BATCH_TOKENS."""
    tokens: int
    """Tokens of a rank in the largest micro-batch."""
    chunk_states: int
    """States whose logits exist at the same time."""
    compute_bytes: int
    """Bytes of a number in forward and backward passes."""
    is_uncompiled: bool
    """Layers are not compiled: those of rows, and recurrent ones."""
    published_bytes: int
    """Bytes of a published number."""
    published_copies: int
    """Published versions in rank 0's memory at the same time: one is sent while another is written."""
    shares_versions: bool
    """The version in memory is a file in /dev/shm."""
    shares_on_gpus: bool
    """Every rank's GPU has the whole version while it is published."""
    checkpointing: Checkpointing
    """ACTIVATION_CHECKPOINTING."""
    frees_parameters: bool
    """SHARD_PARAMETERS."""
    has_offload: bool = False
    """CPU_OFFLOAD."""
    scored_keys: int = 0
    """Tokens of the longest row where attention writes the scores of all pairs of its tokens; 0 where it does not."""
    lora_rank: int = 0
    has_reference: bool = False
    """True with a second, frozen model."""
    has_critic: bool = False
    """True with a critic on a model of its own."""
    compares_vocabularies: bool = False
    """TEACHER_JSD_BETA: the logits of policy and teacher are compared over the whole vocabulary."""
    checkpoints: int = 4
    """Checkpoints on the volume at the same time."""
    context: int = 1
    """CONTEXT_PARALLEL_SIZE."""
    record_groups: RecordGroups = "off"
    """The steps whose groups are recorded."""
    record_bytes: int = 0
    """Most bytes of these records."""
    engine: EngineBeside | None = None
    """The engine on the same GPUs, if there is one."""

    @property
    def shards(self) -> int:
        """Ranks over which the state is spread."""
        return self.nodes * self.ranks_per_node // self.replicas


@dataclass(frozen=True)
class Need:
    """Bytes by name, for each place. On a CPU the parts of a rank's ``device`` memory are in ``host`` memory."""

    device: dict[str, int]
    """Memory of one rank: of its GPU, or of the process without one."""
    generating: dict[str, int]
    """Memory of a rank's GPU while the engine that shares it generates; empty without such an engine."""
    host: dict[str, int]
    """Memory of the node of rank 0, which needs the most."""
    shm: dict[str, int]
    volume: dict[str, int]

    def total(self, place: str) -> int:
        """Return the sum of a place's parts."""
        return sum(getattr(self, place).values())


def needed(shape: ModelShape, work: Work) -> Need:
    """Return the bytes that the work needs."""
    device = _device(shape, work)
    trained, whole = _trained(shape, work), shape.parameters
    # A node writes its part of a checkpoint from a copy; on a mesh that shards within a node, every node copies all.
    copies = _weight_bytes(shape, work) + 4 * MOMENTS * trained + 4 * (1 + MOMENTS) * whole * work.has_critic
    published = work.published_bytes * (trained if work.lora_rank else whole)
    host = {
        "processes": work.ranks_per_node * (PROCESS_BYTES if work.device == "cuda" else PROCESSOR_PROCESS_BYTES),
        # Loading ends before the first version and the first checkpoint.
        "loading, or publication and checkpoint": max(
            *(4 * model.parameters for model in (shape, *shape.teachers)),
            work.published_copies * published + copies * work.replicas // work.nodes,
        ),
    }
    if work.device == "cpu":
        host |= {name: work.ranks_per_node * size for name, size in device.items()}
    elif work.has_offload:
        host["offloaded state"] = work.ranks_per_node * sum(_state(shape, work).values())
    if work.published_bytes == 2 and not work.lora_rank:
        # To measure which share of its change is published; in bfloat16, as most checkpoints are.
        host["weights before training"] = 2 * whole * work.replicas // work.nodes
    merged = 4 if work.lora_rank else work.published_bytes
    return Need(
        device=device,
        generating=_generating(shape, work, device, published),
        host=host,
        shm={
            **({"NCCL": SHM_BYTES} if work.device == "cuda" and work.ranks_per_node > 1 else {}),
            **({"version": published} if work.shares_versions else {}),
        },
        volume={
            "checkpoints": work.checkpoints * copies,
            "versions": VERSIONS * published,
            "model": merged * whole,
            **({"recorded groups": work.record_bytes} if work.record_bytes else {}),
        },
    )


CACHE_SHARE = 0.85
"""Share of the memory of an engine's GPUs for weights, keys and values, if it has them alone."""


def cached_tokens(shape: ModelShape, gpus: int, memory: int) -> int:
    """Return the tokens whose keys and values an engine holds; 0 if its weights leave no room.

    Args:
        shape: the model, in bfloat16.
        gpus: GPUs of the engine, which it has alone.
        memory: bytes of each of them.
    """
    engine = EngineBeside(gpus, tokens=0)
    return max(0, int((memory * CACHE_SHARE - engine.weights(shape)) / engine.token_bytes(shape)))


BETWEEN_STEPS = ("weights", "lower halves of masters", "moments", "reference", "teachers", "critic", "CUDA")
"""The parts that the trainer keeps on a GPU while an engine generates."""
ENGINE_ASLEEP = 3 * 2**29
"""Assumed bytes of a GPU that a sleeping SGLang keeps: CUDA's context, CUDA graphs of 256 sequences, attention's
workspace, adapters. The trainer compares it with what it finds when the engines sleep for the first time."""
ENGINE_AWAKE = 3 * GIB
"""Assumed bytes of SGLang while it generates, without weights, keys and values: ENGINE_ASLEEP, and activations."""


def _generating(shape: ModelShape, work: Work, device: dict[str, int], published: int) -> dict[str, int]:
    """Return the bytes of a GPU when its engine has just woken, besides what the engine keeps asleep."""
    if (engine := work.engine) is None:
        return {}
    return {part: device[part] for part in BETWEEN_STEPS if part in device} | {
        **({"version": published} if work.shares_on_gpus else {}),
        "weights of the engine": engine.weights(shape),
        "keys and values": engine.tokens * engine.token_bytes(shape),
        "rest of the engine": ENGINE_AWAKE - ENGINE_ASLEEP + engine.graph_bytes,
    }


def _trained(shape: ModelShape, work: Work) -> int:
    return work.lora_rank * shape.adapter_rank_parameters if work.lora_rank else shape.parameters


def _weight_bytes(shape: ModelShape, work: Work) -> int:
    """Return the bytes of the policy's weights; on GPUs the base of adapters may be in the compute type (`freeze`)."""
    is_short = work.device == "cuda" and work.compute_bytes == 2 and shape.is_bfloat16
    base = (2 if is_short else 4) * shape.parameters if work.lora_rank else 0
    return base + 4 * _trained(shape, work)


def _device(shape: ModelShape, work: Work) -> dict[str, int]:
    """Return the bytes of one rank at the fullest moment of a step."""
    head = max(_head(shape, work) + _lesson(shape, work), _layer(shape, work), _root(shape, work))
    stored = work.tokens * shape.layers * stored_bytes(shape, work)
    stored += 0 if work.checkpointing else work.tokens * shape.recurrent_layers * shape.mixer_bytes
    # No backward pass frees what frozen models, and the critic for its values, have gathered before the policy does.
    models = [shape] * (1 + work.has_reference + work.has_critic) + [*shape.teachers]
    gathered = sum(model.root_parameters if work.frees_parameters else model.parameters for model in models)
    largest = max(shape.layer_parameters, shape.root_parameters)
    state = (
        {"offloaded shards": OFFLOAD_COPIES * 4 * largest // work.shards} if work.has_offload else _state(shape, work)
    )
    parts = state | {
        "gathered parameters": work.compute_bytes * gathered,
        "activations": stored,
        "scores of attention": _scores(shape, work),
        "logits and backward pass": head,
        "CUDA": CUDA_CONTEXT if work.device == "cuda" else 0,
        "weights of the engine": work.engine.weights(shape) if work.engine and work.engine.keeps_weights else 0,
        "CUDA graphs of the engine": work.engine.graph_bytes if work.engine else 0,
    }
    return {name: size for name, size in parts.items() if size}


KEPT_SCORE_BYTES = 8
"""Most bytes of a score that eager attention keeps for the backward pass: weights in float32, their rounded copy, and
the hyperbolic tangent of a cap. gpt-oss keeps one number."""


def _scores(shape: ModelShape, work: Work) -> int:
    """Return the bytes of what eager attention keeps of its scores, and of three copies in a layer's backward pass."""
    layers = 1 if work.checkpointing else shape.layers
    each = layers * KEPT_SCORE_BYTES + 3 * work.compute_bytes
    return work.tokens * work.scored_keys * shape.heads * each


def _state(shape: ModelShape, work: Work) -> dict[str, int]:
    """Return the bytes of a rank's shards of what lasts from step to step, and of the gradients."""
    trained = _trained(shape, work)
    frozen_bytes = work.compute_bytes if work.device == "cuda" else 4
    frozen = frozen_bytes * shape.parameters * work.has_reference
    teachers = frozen_bytes * sum(teacher.parameters for teacher in shape.teachers)
    critic = 4 * (2 + MOMENTS) * shape.parameters * work.has_critic
    return {
        "weights": _weight_bytes(shape, work) // work.shards,
        "lower halves of masters": 2 * trained // work.shards if work.compute_bytes > work.published_bytes else 0,
        "gradients": 4 * trained // work.shards if work.frees_parameters else 4 * trained,
        "moments": 4 * MOMENTS * trained // work.shards,
        "reference": frozen // work.shards,
        "teachers": teachers // work.shards,
        "critic": critic // work.shards,
    }


OFFLOAD_COPIES = 2
"""Float32 shards of a layer on a GPU at the same time: of weights that are gathered, and of a reduced gradient."""


def stored_bytes(shape: ModelShape, work: Work) -> int:
    """Return the bytes of a token in a layer that the forward pass keeps for the backward pass."""
    states = work.compute_bytes * shape.hidden
    if work.checkpointing == "selective":
        return states + _selected_bytes(shape, work)
    return states if work.checkpointing else layer_bytes(shape, work)


def _selected_bytes(shape: ModelShape, work: Work) -> int:
    """Return the bytes of a token that selective recomputation keeps in a layer besides its input.

    The compiler chooses among whole results of products: those that together took the most operations of all that fit
    into its budget. It always computes attention and a mixture's experts again, but keeps the numbers of the experts.
    What the ranks of a context group send to each other it always keeps.
    """
    size, hidden = work.compute_bytes, shape.hidden
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    products = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]  # columns and rows
    products += [] if shape.token_experts else [(shape.intermediate, hidden)] * 2
    budget = SELECTIVE_BUDGET * (layer_bytes(shape, work) - size * hidden)
    if work.lora_rank:
        return math.ceil(budget)  # an upper bound: which of the adapters' products it keeps was not counted
    subsets = (list(compress(products, chosen)) for chosen in product((False, True), repeat=len(products)))
    sizes = ((sum(c * rows for c, rows in kept), size * sum(c for c, _ in kept)) for kept in subsets)
    received = 0
    if work.context > 1:
        received = size * (queries + 2 * keys) + _exchanged_bytes(shape, work)
    return max(one for one in sizes if one[1] <= budget)[1] + EXPERT_BYTES * shape.token_experts + received


def layer_bytes(shape: ModelShape, work: Work) -> int:
    """Return the bytes that autograd keeps of a token in a layer that is not recomputed.

    A compiled layer keeps its input and the inputs and outputs of products and attention, those only that a norm or
    another product reads; of the MLP the gate, the other factor and their product. It computes norms again from the
    scale of each token or head, which is a float32.
    A mixture also keeps a state before and after each of a token's experts, with the experts' numbers and places.
    """
    if work.device == "cpu" or work.is_uncompiled:
        return uncompiled_layer_bytes(shape, work)
    size, queries, keys = work.compute_bytes, shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    head_norms = size * (queries + keys) + 4 * (shape.heads + shape.kv_heads) if shape.has_head_norms else 0
    others = 4 * (shape.heads + shape.norms) + size * PROJECTIONS * work.lora_rank
    others += shape.token_experts * (2 * size * shape.hidden + EXPERT_BYTES) + _exchanged_bytes(shape, work)
    # Of each norm after a part of a layer, what it reads; the sum of that part's result and its input is found again.
    states = (3 + shape.norms // 2) * shape.hidden
    inner = shape.inner_states * shape.intermediate
    return size * (states + 2 * queries + 2 * keys + inner) + head_norms + others


def _exchanged_bytes(shape: ModelShape, work: Work) -> int:
    """Return the bytes of a token that a layer keeps in addition because a context group exchanges tokens for heads.

    It keeps the output of attention before and after the exchange, and key-value heads as often as ranks need them.
    """
    if work.context == 1:
        return 0
    copies = max(1, work.context // shape.kv_heads)
    return work.compute_bytes * shape.head_size * (shape.heads + 2 * (copies - 1) * shape.kv_heads)


PROJECTIONS = 7
"""Linear layers of a dense layer, each of which has an adapter."""
EXPERT_BYTES = 64
"""The numbers and places of one of a token's experts."""


def uncompiled_layer_bytes(shape: ModelShape, work: Work) -> int:
    """Return the bytes that autograd keeps of a token in a layer without fusion by a compiler.

    A norm keeps its input in float32, and in the compute type the normalised states and its output. The MLP keeps its
    gate, the activation of the gate, the other factor and their product.
    """
    size, queries, keys = work.compute_bytes, shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    norms = 2 * (4 + 2 * size) * shape.hidden
    head_norms = (4 + size) * (queries + keys) if shape.has_head_norms else 0
    attention = size * (2 * queries + 2 * keys)
    if work.device == "cpu":
        attention += size * (queries + 2 * KEYS_PER_TOKEN * keys)
    return norms + head_norms + attention + 4 * size * shape.intermediate + _exchanged_bytes(shape, work)


def _head(shape: ModelShape, work: Work) -> int:
    """Return the bytes of the head's forward pass or, if these are more, of the beginning of its backward pass."""
    size, rows = work.compute_bytes, min(work.chunk_states, work.tokens)
    # Logits in float32; on a CPU also their exponentials, and those of the normaliser.
    copies = 4 if work.device == "cuda" else 12
    forward = work.tokens * shape.hidden * (4 + 2 * size) + rows * shape.vocabulary * copies
    # The last norm's states; the predicting states and their gradients; the float32 terms of the norm's gradient.
    states = work.tokens * shape.hidden * (4 + 2 * size + (4 + 2 * size) + (12 + 4 * size))
    # Logits, on a CPU also their exponentials, in float32, and the gradient of the logits in the compute type.
    copies = 4 if work.device == "cuda" else 8
    logits = rows * shape.vocabulary * (copies + (size if size < 4 else 0))
    gradient = 0 if work.lora_rank else (4 + size) * shape.head_parameters
    in_float32 = 4 * shape.head_parameters if work.device == "cpu" and size < 4 else 0
    return max(forward, states + logits + gradient) + in_float32


def _lesson(shape: ModelShape, work: Work) -> int:
    """Return the bytes of a comparison over the whole vocabulary: each teacher's states, and six copies of a chunk.

    The copies are the logits of both models, their probabilities, those of the mixture, and the gradient.
    """
    if not work.compares_vocabularies:
        return 0
    rows, n = min(work.chunk_states, work.tokens), min(shape.vocabulary, *(t.vocabulary for t in shape.teachers))
    states = sum(work.tokens * work.compute_bytes * teacher.hidden for teacher in shape.teachers)
    return states + 6 * 4 * rows * n + 4 * (shape.head_parameters + work.tokens * shape.hidden)


def _layer(shape: ModelShape, work: Work) -> int:
    """Return the bytes of a layer's backward pass: two gathered layers, their gradients, the layer's own states."""
    size = work.compute_bytes
    gathered = 2 * size * shape.layer_parameters if work.frees_parameters else 0
    gradients = 0 if work.lora_rank else (size + 4) * shape.layer_parameters + size * shape.head_parameters
    recomputed = layer_bytes(shape, work) + shape.mixer_bytes if work.checkpointing else 0
    if work.checkpointing == "selective":
        recomputed -= stored_bytes(shape, work)
    return gathered + gradients + work.tokens * (recomputed + size * (3 * shape.intermediate + shape.hidden))


def _root(shape: ModelShape, work: Work) -> int:
    """Return the bytes when the gradients of embedding and head are reduced, less the activations freed before."""
    if work.lora_rank:
        return 0
    reduced = (work.compute_bytes + 4) * shape.root_parameters
    return max(0, reduced - work.tokens * shape.layers * stored_bytes(shape, work))
