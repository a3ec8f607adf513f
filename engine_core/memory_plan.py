"""What a configuration takes of the device's memory, from config.json and tensor types alone."""

from collections.abc import Mapping

import msgspec

from . import memory_parts as parts
from .config import EngineConfig, served_context
from .device_config import DTYPE_BYTES, Placement
from .draft_config import SpecShape
from .draft_memory import NO_PARTS, draft_parts
from .draft_sizes import NO_DRAFT, draft_sizes, refuse_quantization
from .draft_source import DraftSource
from .draft_window import window_pool
from .drafter_spec import find_drafter
from .forced_drafts import forced_drafts, verify_width
from .graph_sizes import graph_chunk
from .model_config import ModelConfig
from .model_sizes import kv_bytes_per_token, weight_bytes
from .refusal import Refused
from .spec_shape import PLAIN
from .tensor_parallel import shard_model

GIB = 1 << 30
TOKENS_PER_REQUEST = 1024  # of the KV pool for each running request, when nothing is asked for


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the device, of several ranks those of rank 0, which has the output head beside its
    share; what is not there (graphs on a CPU) is 0.

    ``free_bytes``: before the process starts. ``weight_bytes``, ``draft_weight_bytes`` and
    ``kv_bytes`` are exact, the latter of target and draft, with the sink page, which ``num_pages``
    leaves out. ``kv_bytes_per_token`` is the target's, ``draft_kv_bytes_per_token`` comes on top,
    or in a pool of its own of ``draft_window_pages``, the sink included, for a draft that keeps a
    window alone; ``draft_kv_bytes``: its part of ``kv_bytes``.
    ``draft_activation_bytes`` and ``draft_graph_bytes``: what drafting adds to steps and to their
    graphs, the target's features among it. For the other parts see
    :mod:`.memory_parts`: ``context_bytes`` the driver's context and the kernels' code, for several
    ranks NCCL's buffers too; ``loading_bytes`` copies while weights are loaded, which are gone
    before the pool is made, ``activation_bytes`` steps launched kernel by kernel, of sizes up to
    the largest (a prefill chunk beside verify rows of all requests) in any order, ``graph_bytes``
    the CUDA graphs,
    ``state_bytes`` page table, slots,
    requests' text for drafts on the device and rotary table, ``workspace_bytes`` those of matmuls,
    ``allocator_bytes`` unused ends of segments. ``total_bytes``: the peak, whichever is higher of
    loading and serving.
    ``edit_bytes`` come on top once requests ask for penalties, bias or log-probabilities, or for
    grammars that force drafts where nothing else drafts.
    """

    model: str
    device: str
    dtype: str
    tp_size: int
    free_bytes: int
    mem_fraction: float
    context_bytes: int
    weight_bytes: int
    draft_weight_bytes: int
    loading_bytes: int
    kv_bytes_per_token: int
    draft_kv_bytes_per_token: int = 0
    page_size: int
    num_pages: int
    num_tokens: int
    kv_bytes: int
    draft_window_pages: int = 0
    draft_kv_bytes: int = 0
    activation_bytes: int
    draft_activation_bytes: int = 0
    graph_bytes: int
    draft_graph_bytes: int = 0
    state_bytes: int
    workspace_bytes: int
    allocator_bytes: int
    total_bytes: int
    edit_bytes: int

    @property
    def full_draft_kv_bytes(self) -> int:
        """What the draft's KV takes, or would take, in as many pages as the target has."""
        return (self.num_pages + 1) * self.page_size * self.draft_kv_bytes_per_token


def plan_memory(
    config: EngineConfig,
    model: ModelConfig,
    stored: Mapping[str, str],
    placement: Placement,
    free_bytes: int,
    draft: DraftSource | None = None,
) -> MemoryPlan | Refused:
    """Plan ``config`` on a device with ``free_bytes`` before anything is loaded.

    ``draft``: the draft model of algorithms that have one, whose shape ``config`` says.

    ``stored``: the checkpoint's tensor types by name, empty for dummy weights, which have the
    types of ``model``. On CUDA the driver's context is still to come out of ``free_bytes``, and
    the static fraction is of what it leaves. Refused with the numbers when it does not fit.
    """
    share = shard_model(model, config.tp_size)
    if isinstance(share, Refused):
        return share
    model = share
    if placement.device == "cpu":
        free_bytes //= config.tp_size  # the ranks share the machine's memory
    context = served_context(config, model.context_length)
    if isinstance(context, Refused):
        return context
    shape = _shape(config)
    if isinstance(shape, Refused):
        return shape
    refused = refuse_quantization(draft, placement)
    if refused is not None:
        return refused
    width = shape.num_draft_tokens
    on_cuda = placement.device == "cuda"
    item = DTYPE_BYTES[placement.dtype]
    weights = weight_bytes(model, stored, placement, packed=config.tp_size == 1)
    added = NO_DRAFT if draft is None else draft_sizes(draft, placement)
    target_token_bytes = kv_bytes_per_token(model, item)
    pool = None if draft is None else window_pool(config, context, config.page_size, width)
    own_pages = 0 if pool is None else pool.pages
    own_bytes = own_pages * config.page_size * added.kv_bytes_per_token
    token_bytes = target_token_bytes + (0 if own_pages else added.kv_bytes_per_token)
    cuda_context = parts.CONTEXT_BYTES + parts.KERNEL_BYTES if on_cuda else 0
    if on_cuda and config.tp_size > 1:
        cuda_context += parts.NCCL_BYTES
    if cuda_context >= free_bytes:
        return Refused(
            "device",
            f"cuda: the driver's context and the kernels take {gib(cuda_context)}, but "
            f"{gib(free_bytes)} are free; free memory of the GPU, or use --device cpu",
        )
    try:
        pages = plan_num_pages(
            free_bytes,
            placement.mem_fraction,
            weights + added.weight_bytes,
            config.page_size,
            token_bytes,
            wanted_tokens(config, context),
            cuda_context,
            own_bytes,
        )
    except ValueError as error:
        field, _, reason = str(error).partition(": ")
        return Refused(field, reason)
    tokens = pages * config.page_size
    if config.max_total_tokens is not None and pages < config.max_total_tokens // config.page_size:
        size = gib(config.max_total_tokens * token_bytes)
        return Refused(
            "max_total_tokens",
            f"{config.max_total_tokens} tokens of KV, {size}, do not fit beside "
            f"{gib(weights + added.weight_bytes)} of weights{_beside(own_bytes)} into "
            f"{placement.mem_fraction} of "
            f"{_room(free_bytes, cuda_context)}; the memory allows {tokens}; ask for less or raise "
            "--mem-fraction-static",
        )
    nodes = config.max_running_requests * width
    # Without chunks a step takes in whatever the pool holds.
    chunk = config.chunked_prefill_size
    chunk = tokens if chunk == -1 else min(chunk, tokens)
    step = parts.StepSize(chunk + nodes, nodes)
    drafting = NO_PARTS
    if draft is not None:
        drafting = draft_parts(config, draft, model, step, context, placement)
    forced = forced_drafts(config, width) or 0
    edits = parts.forced_bytes(config, model, forced, chunk, item, on_cuda) if forced else 0
    if on_cuda:
        masked = verify_width(config, width)
        edits += parts.edit_bytes(config, model, masked, nodes + forced) + drafting.edit_bytes
    plan = MemoryPlan(
        model=config.model,
        device=placement.device,
        dtype=placement.dtype,
        tp_size=config.tp_size,
        free_bytes=free_bytes,
        mem_fraction=placement.mem_fraction,
        context_bytes=cuda_context,
        weight_bytes=weights,
        draft_weight_bytes=added.weight_bytes,
        loading_bytes=(
            parts.loading_bytes(model, config.load_format == "dummy", item, config.tp_size)
            if on_cuda
            else 0
        ),
        kv_bytes_per_token=target_token_bytes,
        draft_kv_bytes_per_token=added.kv_bytes_per_token,
        page_size=config.page_size,
        num_pages=pages,
        num_tokens=tokens,
        kv_bytes=(pages + 1) * config.page_size * token_bytes + own_bytes,
        draft_window_pages=own_pages,
        draft_kv_bytes=(own_bytes or (pages + 1) * config.page_size * added.kv_bytes_per_token),
        activation_bytes=parts.activation_bytes(model, step, item, on_cuda),
        draft_activation_bytes=drafting.activation_bytes,
        graph_bytes=parts.graph_bytes(config, model, width, item) if on_cuda else 0,
        draft_graph_bytes=drafting.graph_bytes,
        state_bytes=(
            parts.slot_bytes(config, context)
            + parts.rotary_bytes(model)
            + drafting.state_bytes
            + (4 * (pages + 1 + parts.slots(config)) if own_pages else 0)
        ),
        workspace_bytes=(
            parts.workspace_bytes(model, nodes + graph_chunk(config)) if on_cuda else 0
        ),
        allocator_bytes=parts.allocator_bytes() if on_cuda else 0,
        total_bytes=0,
        edit_bytes=edits,
    )
    return _fitting(msgspec.structs.replace(plan, total_bytes=_peak(plan)))


def memory_parts(plan: MemoryPlan) -> tuple[tuple[str, int], ...]:
    """Names and bytes of what is held while the engine serves."""
    return (
        ("CUDA context and kernels", plan.context_bytes),
        ("weights", plan.weight_bytes),
        ("draft weights", plan.draft_weight_bytes),
        ("KV pool", plan.kv_bytes),
        ("activations", plan.activation_bytes),
        ("draft activations", plan.draft_activation_bytes),
        ("CUDA graphs", plan.graph_bytes),
        ("draft graphs", plan.draft_graph_bytes),
        ("state", plan.state_bytes),
        ("workspaces", plan.workspace_bytes),
        ("unused ends of segments", plan.allocator_bytes),
    )


def gib(size: int) -> str:
    """``size`` bytes in GiB, three decimals."""
    return f"{size / GIB:.3f} GiB"


def _peak(plan: MemoryPlan) -> int:
    """The higher of loading (context, weights and the copies made of them) and serving."""
    serving = sum(size for _, size in memory_parts(plan))
    weights = plan.weight_bytes + plan.draft_weight_bytes
    return max(serving, plan.context_bytes + weights + plan.loading_bytes)


def _fitting(plan: MemoryPlan) -> MemoryPlan | Refused:
    needed = plan.total_bytes + plan.edit_bytes
    if needed <= plan.free_bytes:
        return plan
    listed = ", ".join(f"{name} {gib(size)}" for name, size in memory_parts(plan) if size)
    if plan.edit_bytes:
        asked = "penalties, grammars and log-probabilities of all requests"
        listed += f", {asked} {gib(plan.edit_bytes)}"
    flags = ["--max-total-tokens", "--max-running-requests", "--chunked-prefill-size"]
    if plan.graph_bytes:
        flags.append("--cuda-graph-max-bs")
    return Refused(
        "mem_fraction_static",
        f"{plan.mem_fraction}: {plan.num_tokens} tokens of KV and what serving takes beside it "
        f"need {gib(needed)}, but {gib(plan.free_bytes)} are free: {listed}; lower it, "
        f"{', '.join(flags[:-1])} or {flags[-1]}",
    )


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
    context_bytes: int = 0,
    own_bytes: int = 0,
) -> int:
    """Usable pages of the pool.

    Weights and KV together, with ``own_bytes`` of a draft's own pool, may take ``mem_fraction`` of
    what a CUDA context of ``context_bytes`` leaves of ``free_bytes``, the memory that was free
    before. ``max_total_tokens`` caps the result.
    Raises ValueError when not even one page (and the sink) fits.
    """
    if not 0.0 < mem_fraction < 1.0:
        raise ValueError(f"mem_fraction_static: must be between 0 and 1, is {mem_fraction}")
    budget = int((free_bytes - context_bytes) * mem_fraction) - weight_bytes - own_bytes
    pages = budget // (page_size * token_bytes) - 1
    if pages < 1:
        raise ValueError(
            f"mem_fraction_static: {mem_fraction} of {_room(free_bytes, context_bytes)} leaves no "
            f"room for KV beside {gib(weight_bytes)} of weights{_beside(own_bytes)}; raise it or "
            f"take a smaller model{' or draft window' if own_bytes else ''}"
        )
    if max_total_tokens is not None:
        if max_total_tokens < page_size:
            raise ValueError(
                f"max_total_tokens: {max_total_tokens} is below the page size {page_size}"
            )
        pages = min(pages, max_total_tokens // page_size)
    return pages


def _beside(own_bytes: int) -> str:
    return f" and {gib(own_bytes)} of the draft's window" if own_bytes else ""


def _room(free_bytes: int, context_bytes: int) -> str:
    beside = f" beside a CUDA context of {gib(context_bytes)}" if context_bytes else ""
    return f"the {gib(free_bytes - context_bytes)} that are free{beside}"


def _shape(config: EngineConfig) -> SpecShape | Refused:
    if config.speculative_algorithm is None:
        return PLAIN
    spec = find_drafter(config.speculative_algorithm)
    return spec if isinstance(spec, Refused) else config.shape(spec)
