"""What a configuration takes of the device's memory, from config.json and tensor types alone."""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from .config import EngineConfig
from .device_config import DTYPE_BYTES, Placement
from .drafter_spec import find_drafter
from .model_config import ModelConfig
from .refusal import Refused
from .tensor_parallel import shard_model

GIB = 1 << 30
TOKENS_PER_REQUEST = 1024  # of the KV pool for each running request, when nothing is asked for
_OVERRUN_TOKENS = 130  # positions past the context that steps in flight may reach
_CUBLAS_WORKSPACE = 32 << 20  # torch's default on Hopper
_SLOT_BYTES = 64  # a slot's lengths, last token and sampling columns


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the device; of several ranks those of rank 0, which has the output head beside its
    share. ``kv_bytes`` includes the sink page, ``num_pages`` does not.

    ``weight_bytes`` and ``kv_bytes`` are exact; of what else a step needs:

    - ``activation_bytes``: the larger of T * (2 hidden + max(2 q + 2 kv, 3 intermediate)) elements
      in a layer (stream and normed stream; qkv and attention output, or gate_up and their product)
      and T * 2 hidden elements + N * vocabulary logits in float32 (and in the computation type)
      after the last. T = chunk tokens + N, N = running requests * verify width.
    - ``graph_bytes``: the same with T = N = most requests of a CUDA graph * verify width; all
      graphs share one pool, which the largest one fills. 0 on a CPU and without graphs.
    - ``state_bytes``: page table, slots, rotary table, and cuBLAS' workspace on CUDA.
    """

    model: str
    device: str
    dtype: str
    tp_size: int
    free_bytes: int
    mem_fraction: float
    weight_bytes: int
    draft_weight_bytes: int
    kv_bytes_per_token: int
    page_size: int
    num_pages: int
    num_tokens: int
    kv_bytes: int
    activation_bytes: int
    graph_bytes: int
    state_bytes: int
    total_bytes: int


class _Step(NamedTuple):
    """Sizes of the largest step: query tokens, and rows of logits."""

    tokens: int
    nodes: int


def plan_memory(
    config: EngineConfig,
    model: ModelConfig,
    stored: Mapping[str, str],
    placement: Placement,
    free_bytes: int,
) -> MemoryPlan | Refused:
    """Plan ``config`` on a device with ``free_bytes`` before anything is loaded.

    ``stored``: the checkpoint's tensor types by name, empty for dummy weights, which have the
    types of ``model``. Refused with the numbers when it does not fit.
    """
    share = shard_model(model, config.tp_size)
    if isinstance(share, Refused):
        return share
    model = share
    if placement.device == "cpu":
        free_bytes //= config.tp_size  # the ranks share the machine's memory
    context = config.context_length or model.context_length
    if context > model.context_length:
        reason = f"{context} exceeds the model's {model.context_length}; ask for less"
        return Refused("context_length", reason)
    width = _verify_width(config)
    if isinstance(width, Refused):
        return width
    item = DTYPE_BYTES[placement.dtype]
    weights = weight_bytes(model, stored, placement, packed=config.tp_size == 1)
    token_bytes = kv_bytes_per_token(model, item)
    try:
        pages = plan_num_pages(
            free_bytes,
            placement.mem_fraction,
            weights,
            config.page_size,
            token_bytes,
            wanted_tokens(config, context),
        )
    except ValueError as error:
        field, _, reason = str(error).partition(": ")
        return Refused(field, reason)
    if config.max_total_tokens is not None and pages < config.max_total_tokens // config.page_size:
        return Refused(
            "max_total_tokens",
            f"{config.max_total_tokens} tokens of KV ({config.max_total_tokens * token_bytes} "
            f"bytes) do not fit beside {weights} bytes of weights into {placement.mem_fraction} "
            f"of {free_bytes} free bytes; the memory allows {pages * config.page_size}; ask for "
            "less or raise --mem-fraction-static",
        )
    on_cuda = placement.device == "cuda"
    nodes = config.max_running_requests * width
    chunk = context if config.chunked_prefill_size == -1 else config.chunked_prefill_size
    activations = _activation_bytes(model, _Step(chunk + nodes, nodes), item)
    graphs = 0
    if on_cuda and not config.disable_cuda_graph:
        most = config.max_running_requests
        rows = min(config.cuda_graph_max_bs or most, most)
        graphs = _activation_bytes(model, _Step(rows * width, rows * width), item)
    state = _state_bytes(config, model, context) + (_CUBLAS_WORKSPACE if on_cuda else 0)
    kv_bytes = (pages + 1) * config.page_size * token_bytes
    total = weights + kv_bytes + activations + graphs + state
    if total > free_bytes:
        return Refused(
            "mem_fraction_static",
            f"{placement.mem_fraction}: {weights} bytes of weights, {kv_bytes} of KV "
            f"({pages * config.page_size} tokens), {activations} of activations, {graphs} of CUDA "
            f"graphs and {state} of state are {total}, more than the {free_bytes} that are free; "
            "lower it, --max-total-tokens, --max-running-requests or --chunked-prefill-size",
        )
    return MemoryPlan(
        model=config.model,
        device=placement.device,
        dtype=placement.dtype,
        tp_size=config.tp_size,
        free_bytes=free_bytes,
        mem_fraction=placement.mem_fraction,
        weight_bytes=weights,
        draft_weight_bytes=0,  # every drafter that is built so far proposes on the host
        kv_bytes_per_token=token_bytes,
        page_size=config.page_size,
        num_pages=pages,
        num_tokens=pages * config.page_size,
        kv_bytes=kv_bytes,
        activation_bytes=activations,
        graph_bytes=graphs,
        state_bytes=state,
        total_bytes=total,
    )


def kv_bytes_per_token(model: ModelConfig, item: int) -> int:
    """KV bytes of one token over all layers; ``item``: bytes of an element."""
    return 2 * model.num_hidden_layers * model.kv_size * item


def wanted_tokens(config: EngineConfig, context: int) -> int:
    """Tokens of the KV pool if the memory allows: as asked for, or by need."""
    need = max(2 * context, config.max_running_requests * TOKENS_PER_REQUEST)
    return config.max_total_tokens or need


def plan_num_pages(
    free_bytes: int,
    mem_fraction: float,
    weight_bytes: int,
    page_size: int,
    token_bytes: int,
    max_total_tokens: int | None = None,
) -> int:
    """Usable pages of the pool.

    Weights and KV together may take ``mem_fraction`` of ``free_bytes``, the memory that was free
    before the weights were loaded. ``max_total_tokens`` caps the result. Raises ValueError when
    not even one page (and the sink) fits.
    """
    if not 0.0 < mem_fraction < 1.0:
        raise ValueError(f"mem_fraction_static: must be between 0 and 1, is {mem_fraction}")
    budget = int(free_bytes * mem_fraction) - weight_bytes
    pages = budget // (page_size * token_bytes) - 1
    if pages < 1:
        raise ValueError(
            f"mem_fraction_static: {mem_fraction} of {free_bytes} free bytes leaves no room for "
            f"KV beside {weight_bytes} bytes of weights; raise it or take a smaller model"
        )
    if max_total_tokens is not None:
        if max_total_tokens < page_size:
            raise ValueError(
                f"max_total_tokens: {max_total_tokens} is below the page size {page_size}"
            )
        pages = min(pages, max_total_tokens // page_size)
    return pages


def weight_bytes(
    model: ModelConfig, stored: Mapping[str, str], placement: Placement, packed: bool = True
) -> int:
    """Bytes of the weights in memory, as the engine's model classes count them.

    ``packed``: a CPU runs its own kernels where it can, as it does with one rank.
    """
    if packed and placement.device == "cpu" and model.head_dim % 8 == 0:
        return _packed_bytes(model, stored)
    return _elements(model) * DTYPE_BYTES[placement.dtype]


def _elements(model: ModelConfig) -> int:
    """Elements of all tensors, a tied head counted once."""
    hidden, inner = model.hidden_size, model.intermediate_size
    q, kv = model.q_size, model.kv_size
    layer = (q + 2 * kv) * hidden + hidden * q + 3 * inner * hidden + 2 * hidden
    layer += 2 * model.head_dim if model.qk_norm else 0
    layer += q + 2 * kv if model.qkv_bias else 0
    layer += hidden if model.o_bias else 0
    layer += 2 * inner + hidden if model.mlp_bias else 0
    heads = 1 if model.tie_word_embeddings else 2
    return model.num_hidden_layers * layer + heads * model.vocab_size * hidden + hidden


def _packed_bytes(model: ModelConfig, stored: Mapping[str, str]) -> int:
    """Of the CPU kernels' matrices: outputs padded to 16, gate/up pairs to 8 of each.

    bfloat16 stays bfloat16; what is stored otherwise becomes float32.
    """
    hidden, inner = model.hidden_size, model.intermediate_size
    q, kv = model.q_size, model.kv_size

    def item(*names: str) -> int:
        default = model.torch_dtype
        return 2 if all(stored.get(f"{n}.weight", default) == "bfloat16" for n in names) else 4

    total = 0
    for index in range(model.num_hidden_layers):
        at, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        qkv = item(f"{at}.q_proj", f"{at}.k_proj", f"{at}.v_proj")
        total += _padded(q + 2 * kv) * hidden * qkv
        total += _padded(hidden) * q * item(f"{at}.o_proj")
        gate_up = item(f"{mlp}.gate_proj", f"{mlp}.up_proj")
        total += -(-inner // 8) * 16 * hidden * gate_up
        total += _padded(hidden) * inner * item(f"{mlp}.down_proj")
    embed = item("model.embed_tokens")
    if model.tie_word_embeddings:
        return total + _padded(model.vocab_size) * hidden * embed
    head = _padded(model.vocab_size) * hidden * item("lm_head")
    return total + head + model.vocab_size * hidden * embed


def _padded(outputs: int) -> int:
    return -(-outputs // 16) * 16


def _verify_width(config: EngineConfig) -> int | Refused:
    if config.speculative_algorithm is None:
        return 1
    spec = find_drafter(config.speculative_algorithm)
    return spec if isinstance(spec, Refused) else config.num_draft_tokens(spec)


def _activation_bytes(model: ModelConfig, step: _Step, item: int) -> int:
    stream = 2 * model.hidden_size
    attention = 2 * model.q_size + 2 * model.kv_size
    layer = step.tokens * (stream + max(attention, 3 * model.intermediate_size)) * item
    logit = 4 + (item if item != 4 else 0)
    return max(layer, step.tokens * stream * item + step.nodes * model.vocab_size * logit)


def _state_bytes(config: EngineConfig, model: ModelConfig, context: int) -> int:
    slots = 2 * config.max_running_requests
    pages = -(-(context + _OVERRUN_TOKENS) // config.page_size)
    rotary = (model.context_length + _OVERRUN_TOKENS) * model.head_dim * 4
    return slots * (4 * pages + _SLOT_BYTES) + rotary
