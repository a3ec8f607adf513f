"""What a step takes of a device's memory beside weights and KV, part by part.

The parts follow the GPU path's allocations (``engine/models/gpu_decoder.py``, ``engine/gpu``):
a change there belongs here too. Pinned rings are host memory. ``benchmarks/memory_gpu.py`` holds
their sum against an engine.
"""

from typing import NamedTuple

from .config import EngineConfig
from .graph_sizes import CHUNK_ROWS, chunk_tiers, graph_chunk, graph_rows
from .model_config import ModelConfig

OVERRUN_TOKENS = 130  # steps in flight may run a request past its context: two rows of 64 tokens

# The driver's context and torch's share of it, before any kernel is loaded.
CONTEXT_BYTES = 520 << 20
# Code of cuBLAS, torch and Triton kernels, which is loaded when they are first launched, and the
# driver's memory for launching it: what an H200 held outside torch's allocator at pycoder's peak,
# less its context and its graphs.
KERNEL_BYTES = 145 << 20
# NCCL's buffers and channels of a rank, as seen with two H200s.
NCCL_BYTES = 1 << 30
_GRAPH_NODE_BYTES = 4 << 10  # the driver's record of a kernel in an instantiated graph

JUDGED_KERNELS = 24  # what acceptance has where it is more than the coupled draw
_CUBLAS_WORKSPACE = 32 << 20  # torch's on Hopper, one for each stream that runs matmuls
_CUBLAS_STREAMS = 2  # eager steps, and captures
_PROCESSORS = 132  # of an H200
_SPLIT_PROGRAMS = 2 * _PROCESSORS  # attention with split keys has no more programs than this,
_SPLIT_ROWS = 128  # with this many float32 rows each
_MATMUL_PARTS = 16  # of K, at most, in the weight-streaming matmul,
_MATMUL_OUTPUTS = (
    1 << 16
)  # and no more parts times outputs than this; in Hopper's every program has
_MATMUL_SUMS = 2 * _PROCESSORS * 2 * 64  # room for two tiles of up to 2 x 64 outputs
_MATMUL_ROWS = 128  # of its highest tile
_SAMPLE_BYTES = (3 * 4 + 5 * 8) * 2048 + 4096  # of a row: the histograms of the filters' search
_SLOT_BYTES = 64  # a slot's lengths, last token and sampling columns
_TOKEN_BYTES = 64  # of a query token: ids, positions, slots, tree bits, and its staging
_SEGMENT = 20 << 20  # torch's allocator asks for so much for tensors of 1 to 10 MiB
_EDIT_COPIES = 3  # in float32: edited logits of a step and of the graphs, raw ones for logprobs
_LIST_BYTES = 512 * (4 + 4)  # of a slot: ids and values that are biased or masked
_BAN_BYTES = 4 * (512 + 65 + 33)  # of a slot: banned sequences, their bounds, newest tokens


class StepSize(NamedTuple):
    """Query tokens of a step, and those among them that need logits."""

    tokens: int
    nodes: int


def activation_bytes(model: ModelConfig, size: StepSize, item: int, on_cuda: bool) -> int:
    """Memory of steps of up to ``size``, launched one by one in any order of sizes.

    ``item``: bytes of an element of the computation type. A CPU gives back what a step frees, so
    there it is the tensors of the largest step. torch's CUDA allocator keeps it, and blocks of a
    short prefill are too small for a longer one's, which takes new ones beside them: steps that
    double leave the largest's blocks, half of them, a quarter and so on, less than twice the
    largest's altogether. Twice is planned.

    Sizes that grow in smaller steps (a full chunk beside one more decoding request each time)
    fill what is there, except that the widest tensor needs a new block whenever it has grown by
    2 MiB. Enough of them hold more than any plan; but when a new block cannot be had, torch gives
    back the segments that nothing lies in and asks again. What must stay is a step's tensors and
    the segments that they lie in: badly placed, below 1.25 times a single step's in all orders
    that ``tests/engine_core/test_mixed_steps.py`` tries. So twice is what steps can count on, not
    the most that torch keeps while the device has room.
    """
    if on_cuda:
        return 2 * step_bytes(model, size, item) + _split_bytes(model)
    stream, attention, mlp = _phases(model, size.tokens, item)
    head = size.nodes * model.vocab_size * item
    logits = size.nodes * model.vocab_size * 4
    return max(stream + max(attention, mlp), stream + logits + (head if item != 4 else 0))


def _phases(model: ModelConfig, tokens: int, item: int) -> tuple[int, int, int]:
    """Tensors of a forward pass: of all layers, of attention, of the MLP.

    A layer holds the stream and its norm (2 hidden a token) through two phases: qkv and query,
    then gate_up and their product; or the sum and norm behind either.
    """
    hidden, inner = model.hidden_size, model.intermediate_size
    qkv = model.q_size + 2 * model.kv_size
    attention = max(qkv + model.q_size, 2 * hidden + model.q_size)
    mlp = max(3 * inner, 2 * hidden + inner)
    return 2 * hidden * tokens * item, attention * tokens * item, mlp * tokens * item


def step_bytes(model: ModelConfig, size: StepSize, item: int) -> int:
    """What grows with a step's tokens of the blocks that it takes of an empty CUDA pool.

    torch's allocator cuts a large block up but joins no two, so the phases, with the context that
    follows qkv, add up, as do hidden rows and logits, except logits that fit a block of gate_up.
    """
    stream, attention, mlp = _phases(model, size.tokens, item)
    in_attention = 3 * model.q_size + 2 * model.kv_size  # qkv, query and context
    attention = max(attention, in_attention * size.tokens * item)
    head = size.nodes * model.vocab_size * item
    gate_up = 2 * model.intermediate_size * size.tokens * item
    beyond = 0 if head <= gate_up else head
    search = size.nodes * _SAMPLE_BYTES
    return stream + attention + mlp + beyond + search + _TOKEN_BYTES * size.tokens


def _split_bytes(model: ModelConfig) -> int:
    return _SPLIT_PROGRAMS * _SPLIT_ROWS * (model.head_dim + 1) * 4


def graph_bytes(config: EngineConfig, model: ModelConfig, width: int, item: int) -> int:
    """All graphs' shared pool and the driver's record of their kernels.

    The largest is captured first, and the others find its blocks.
    """
    if config.disable_cuda_graph:
        return 0
    pool = step_bytes(model, graph_size(config, width), item) + _split_bytes(model)
    return pool + _SEGMENT + _record_bytes(config, model, width)


def forced_bytes(
    config: EngineConfig, model: ModelConfig, forced: int, chunk: int, item: int, on_cuda: bool
) -> int:
    """What ``forced`` drafts, which grammars make where nothing else drafts, add to a step: to one
    that is launched kernel by kernel, and to the pool of graphs on CUDA.
    """

    def more(size: StepSize) -> StepSize:
        return StepSize(size.tokens + forced, size.nodes + forced)

    rows = config.max_running_requests
    plain = StepSize(chunk + rows, rows)
    added = activation_bytes(model, more(plain), item, on_cuda)
    added -= activation_bytes(model, plain, item, on_cuda)
    if on_cuda and not config.disable_cuda_graph:
        plain = graph_size(config, 1)
        added += step_bytes(model, more(plain), item) - step_bytes(model, plain, item)
    return added


def graph_size(config: EngineConfig, width: int) -> StepSize:
    """The largest step that replays a graph: a chunk's tokens beside all verify rows."""
    nodes = graph_rows(config) * width
    return StepSize(nodes + graph_chunk(config), nodes + CHUNK_ROWS)


def _record_bytes(config: EngineConfig, model: ModelConfig, width: int) -> int:
    judged = JUDGED_KERNELS if config.lossy else 0
    return record_bytes(config, 10 * model.num_hidden_layers + 20 + judged, width)


def record_bytes(config: EngineConfig, kernels: int, width: int) -> int:
    """The driver's records of ``kernels`` in all tiers, greedy ones and those that sample."""
    rows, chunk = graph_rows(config), graph_chunk(config)
    # About three sizes of rows a doubling of two, and as many of tokens for rows with drafts.
    graphs = _tier_sizes(rows) * (1 + (_tier_sizes(width) if width > 1 else 0))
    graphs += sum(1 for each in {1, width} for _ in chunk_tiers(rows, each, chunk))
    return 2 * graphs * kernels * _GRAPH_NODE_BYTES


def _tier_sizes(top: int) -> int:
    return 3 * top.bit_length() // 2


def slot_bytes(config: EngineConfig, context: int) -> int:
    """Page table and columns of the slots, and their requests' text for drafts on the device."""
    pages = -(-(context + OVERRUN_TOKENS) // config.page_size)
    text = 4 * pages * config.page_size if config.speculative_ngram_source != "cpu" else 0
    return slots(config) * (4 * pages + _SLOT_BYTES + text)


def slots(config: EngineConfig) -> int:
    """Twice as many as running requests, and the spare one of padding."""
    return 2 * config.max_running_requests + 1


def rotary_bytes(model: ModelConfig) -> int:
    """float32 cos and sin of half a head, for every position."""
    return (model.context_length + OVERRUN_TOKENS) * model.head_dim * 4


def workspace_bytes(model: ModelConfig, nodes: int) -> int:
    """cuBLAS' workspaces and the sums that parts of a split matmul leave for each other."""
    widest = max(model.hidden_size, model.q_size + 2 * model.kv_size, 2 * model.intermediate_size)
    rows = min(_MATMUL_ROWS, 1 << (max(nodes, 16) - 1).bit_length())
    sums = max(min(_MATMUL_PARTS * widest, _MATMUL_OUTPUTS), _MATMUL_SUMS) * rows
    return _CUBLAS_STREAMS * _CUBLAS_WORKSPACE + sums * 4


def allocator_bytes() -> int:
    """What the last segment of torch's allocator leaves unused, at most."""
    return _SEGMENT


def loading_bytes(model: ModelConfig, dummy: bool, item: int, tp_size: int = 1) -> int:
    """Copies that making a layer takes: of gate and up, interleaved.

    Random weights are also drawn on the device, part by part, before they are joined; each of
    ``tp_size`` ranks, whose share is ``model``, draws the whole matrices that it takes its part of.
    """
    hidden = model.hidden_size
    gate_up = 2 * model.intermediate_size * hidden * item
    qkv = (model.q_size + 2 * model.kv_size) * hidden * item
    if not dummy:
        return gate_up
    widest = max(model.intermediate_size, model.q_size) * tp_size
    return gate_up + gate_up + qkv + (widest * hidden * item if tp_size > 1 else 0)


def edit_bytes(config: EngineConfig, model: ModelConfig, width: int, verified: int) -> int:
    """Logits in float32, token counts and lists, if every running request asks for all of it.

    ``width``: most query tokens of a verify row, ``verified`` of all such rows together.

    Penalties, biases, minimum lengths and bans have graphs of their own, captured when they are
    needed; log-probabilities are computed step by step.
    """
    nodes = verified + CHUNK_ROWS
    logits = _EDIT_COPIES * 4 * nodes * model.vocab_size
    vocab = 4 * model.vocab_size + model.vocab_size // 8  # token counts, allowed tokens
    lists = slots(config) * (vocab + _LIST_BYTES + _BAN_BYTES)
    records = 0
    if not config.disable_cuda_graph:
        records = _record_bytes(config, model, width)
    return logits + lists + records
