"""The engine's configuration: one strict struct, the source of the CLI flags and their table."""

from typing import Annotated, Literal

import msgspec

from .accept_rules import DRAWING, AcceptRule
from .available_cores import available_cores
from .device_config import refuse_on
from .draft_config import SpecShape
from .draft_window import WindowPool, window_pool
from .drafter_spec import NGRAM, NGRAM_BY_SOURCE, DrafterSpec, DraftKV, find_drafter
from .forced_drafts import forced_drafts, may_have_grammars, verify_width
from .graph_sizes import verify_tokens
from .ngram import NgramConfig
from .processor_names import refuse_processors
from .ragged_verify import RaggedVerify, read_ragged
from .refusal import Refused
from .spec_shape import PLAIN, draft_reach, given_shape
from .speculation_checks import refuse_speculation
from .tensor_parallel import MAX_TP_SIZE
from .worker import WorkerInfo

Doc = msgspec.Meta
MAX_RUNNING_REQUESTS = 65_536
PREEMPTION_THRESHOLD = 10


def is_speculation(field: str) -> bool:
    """Whether a field of EngineConfig is of no use without a drafter."""
    return field.startswith(("speculative_", "simulate_"))


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user asks for; every field is a flag (underscores become dashes)."""

    model: Annotated[str, Doc(description="`pycoder`, a local folder or a Hugging Face id")]
    tokenizer_path: Annotated[
        str | None, Doc(description="folder of the tokenizer; the model's own if unset")
    ] = None
    revision: Annotated[str | None, Doc(description="revision of a Hugging Face id")] = None
    served_model_name: Annotated[
        str | None, Doc(description="name in API answers; the model's if unset")
    ] = None
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"],
        Doc(
            description="auto and safetensors: read *.safetensors; dummy: random weights of "
            "config.json's shapes, for timing"
        ),
    ] = "auto"
    skip_tokenizer_init: Annotated[
        bool,
        Doc(description="load no tokenizer: prompts are token ids, answers have no text"),
    ] = False
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        Doc(
            description="computation type; auto: the checkpoint's own on CUDA, float32 on a CPU, "
            "which has no other"
        ),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Doc(description="where the model runs; auto: on CUDA if there is a device"),
    ] = "auto"
    tp_size: Annotated[
        int,
        Doc(
            description="ranks that share the model by tensor parallelism: one process and, on "
            "CUDA, one GPU each"
        ),
    ] = 1
    num_threads: Annotated[
        int | None, Doc(description="OpenMP threads of a rank; measured at start if unset")
    ] = None
    grammar_threads: Annotated[
        int | None,
        Doc(
            description="threads that make grammars' masks while the model runs; if unset half of "
            "the cores, 8 at most"
        ),
    ] = None
    context_length: Annotated[
        int | None, Doc(description="maximum tokens of a request; the model's own if unset")
    ] = None
    page_size: Annotated[int, Doc(description="tokens of a KV page: 1, 16, 32 or 64")] = 16
    mem_fraction_static: Annotated[
        float | None,
        Doc(
            description="share of free memory that weights and KV pool may take; if unset 0.9 on "
            "CUDA, 0.5 on a CPU"
        ),
    ] = None
    max_total_tokens: Annotated[
        int | None,
        Doc(
            description="tokens of the KV pool; if unset 1,024 for each running request, "
            "two contexts at least, and no more than mem_fraction_static allows"
        ),
    ] = None
    max_running_requests: Annotated[int, Doc(description="requests that run at a time")] = 48
    max_queued_requests: Annotated[
        int | None, Doc(description="waiting requests beyond which new ones get 503")
    ] = None
    chunked_prefill_size: Annotated[
        int, Doc(description="prompt tokens a step takes, over all requests; -1: no chunks")
    ] = 512
    schedule_policy: Annotated[
        Literal["fcfs", "lpm"], Doc(description="order of the queue: arrival, or longest prefix")
    ] = "fcfs"
    enable_priority_scheduling: Annotated[
        bool, Doc(description="higher `priority` first; may retract lower ones")
    ] = False
    priority_preemption_threshold: Annotated[
        int, Doc(description="difference of priority above which a running request is retracted")
    ] = PREEMPTION_THRESHOLD
    disable_overlap_schedule: Annotated[
        bool, Doc(description="plan a step only after the previous one's result")
    ] = False
    cuda_graph_max_bs: Annotated[
        int | None,
        Doc(
            description="most requests that decode in a step that replays a CUDA graph; "
            "max_running_requests if unset"
        ),
    ] = None
    disable_cuda_graph: Annotated[bool, Doc(description="launch every kernel by itself")] = False
    disable_radix_cache: Annotated[bool, Doc(description="no prefix reuse")] = False
    stream_interval: Annotated[
        int, Doc(description="tokens between two chunks of a stream; the first comes at once")
    ] = 1
    logits_processors: Annotated[
        str | None,
        Doc(
            description="custom logits processors that requests may ask for: NAME of an installed "
            "package's, module:Class or NAME=module:Class, several with commas between them, in "
            "the order of their work (docs/logits-processors.md)"
        ),
    ] = None
    random_seed: Annotated[
        int, Doc(description="seed from which requests without one draw theirs")
    ] = 0
    speculative_algorithm: Annotated[
        str | None,
        Doc(description="drafter: NGRAM, STANDALONE, EAGLE, EAGLE3, DFLASH, DSPARK; none if unset"),
    ] = None
    speculative_draft_model_path: Annotated[
        str | None,
        Doc(
            description="draft model of all drafters but NGRAM: a folder or a Hugging Face id; if "
            "unset the one that ships with `pycoder`, for DSPARK also one that comes with the "
            "target, in its folder or in `dspark/` there"
        ),
    ] = None
    speculative_draft_model_revision: Annotated[
        str | None, Doc(description="revision of a draft model's Hugging Face id")
    ] = None
    speculative_draft_load_format: Annotated[
        Literal["auto", "safetensors", "dummy"] | None,
        Doc(description="as --load-format, for the draft model; --load-format's if unset"),
    ] = None
    speculative_draft_model_quantization: Annotated[
        Literal["int8"] | None,
        Doc(
            description="int8: the matrices of an EAGLE or EAGLE3 draft, and its head, are rounded "
            "to 8-bit integers with a scale of each output, on a CPU; a draft pass reads half the "
            "bytes. The target stays as it is, and so does the output"
        ),
    ] = None
    speculative_num_steps: Annotated[
        int | None,
        Doc(
            description="tokens that a draft model drafts one after the other; if unset the "
            "draft's own config.json says, else it is 3, or for a Llama 5 with topk 4 and 8 draft "
            "tokens; DFLASH and DSPARK draft all of a block at once, whatever it says"
        ),
    ] = None
    speculative_eagle_topk: Annotated[
        int | None,
        Doc(
            description="branches of a draft model's tree, up to 63, on a GPU up to 8, and with "
            "topk * (steps - 1) up to 64; 1, a chain, if only the steps are set"
        ),
    ] = None
    speculative_num_draft_tokens: Annotated[
        int | None,
        Doc(
            description="nodes verified a request, bonus token included; 12 for NGRAM; of a draft "
            "model's chain always steps + 1, of DFLASH the block size, of DSPARK one more"
        ),
    ] = None
    speculative_dflash_block_size: Annotated[
        int | None,
        Doc(
            description="DFLASH: tokens of a block, the bonus token included; if unset the draft's "
            "config.json says, else 16"
        ),
    ] = None
    speculative_dspark_block_size: Annotated[
        int | None,
        Doc(
            description="DSPARK: tokens that a block drafts, gamma; if unset the draft's "
            "config.json says, else 7"
        ),
    ] = None
    speculative_draft_window_size: Annotated[
        int | None,
        Doc(
            description="DFLASH, DSPARK: the draft keeps keys and values of each request's last so "
            "many tokens alone, in a small pool of its own, and reads no more; all if unset "
            "(docs/draft_window.md)"
        ),
    ] = None
    speculative_token_map: Annotated[
        str | None,
        Doc(
            description="JSON file of the target's token ids that EAGLE drafts from, a list; all "
            "if unset"
        ),
    ] = None
    speculative_accept_threshold_single: Annotated[
        float,
        Doc(
            description="sampled requests accept a draft to which the target gives at least this "
            "probability; below 1 outputs are not the target's distribution any more"
        ),
    ] = 1.0
    speculative_accept_threshold_acc: Annotated[
        float,
        Doc(
            description="sampled requests accept a draft of probability p with p / this, siblings "
            "added up; below 1 outputs are not the target's distribution any more"
        ),
    ] = 1.0
    speculative_use_rejection_sampling: Annotated[
        bool,
        Doc(
            description="sampled requests draw a draft model's drafts at their temperature, and "
            "each is accepted by what both models give it: more are than by the coupled rule, but "
            "a seed gives the same tokens only with the same draft, drafted lengths and flags; "
            "chains (topk 1) and blocks of draft models"
        ),
    ] = False
    speculative_use_block_verification: Annotated[
        bool,
        Doc(
            description="rejection sampling, which it turns on, that decides about all drafts of a "
            "row together: at least as many are accepted as one after the other, from the same "
            "distribution; for chains and blocks of draft models, with "
            "--speculative-ragged-verify-mode static"
        ),
    ] = False
    speculative_length_policy: Annotated[
        Literal["auto", "fixed"],
        Doc(description="auto: draft only where measured times say it pays; fixed: always"),
    ] = "auto"
    speculative_ragged_verify_mode: Annotated[
        Literal["static", "cap-accept", "compact"] | None,
        Doc(
            description="which drafts of a row are verified: static: all; compact: those that its "
            "verify length leaves, packed; cap-accept: all, but none beyond that length is "
            "accepted, for tests. Lengths come from the drafter's confidence, or from the length "
            "policy (docs/verify_planner.md). SGLANG_RAGGED_VERIFY_MODE if unset, else static"
        ),
    ] = None
    speculative_dspark_sps_table_path: Annotated[
        str | None,
        Doc(
            description="SPS table of what a verify step costs by its size, of `outrider profile "
            "sps`, for drafters that give confidence; without one every draft is verified"
        ),
    ] = None
    speculative_dspark_confidence_sts_path: Annotated[
        str | None,
        Doc(
            description="STS table of temperatures of a drafter's confidence, one a draft "
            "position, of `outrider profile sts`; if unset the sts.json in the draft's folder, "
            "else all 1"
        ),
    ] = None
    speculative_dspark_align_verify_tokens_to_graph_tier: Annotated[
        bool,
        Doc(description="compact: tokens that a CUDA graph would be padded with verify drafts"),
    ] = False
    simulate_accept_length: Annotated[
        float | None,
        Doc(
            description="force an accept length of this mean, bonus token included, whatever the "
            "model says, on rows that verify drafts; a row gets no more than was proposed for it, "
            "and the length policy may draft less or not at all (use "
            "--speculative-length-policy fixed). For timing only: the text is wrong and every "
            "answer says `simulated`"
        ),
    ] = None
    simulate_survival: Annotated[
        float | None,
        Doc(
            description="accept drafts by a made-up process instead, whose chances, of this mean, "
            "are the drafter's confidence too, different for each request and place (DSPARK; modes "
            "static and compact). For timing only, and marked as --simulate-accept-length is"
        ),
    ] = None
    speculative_ngram_source: Annotated[
        Literal["cpu", "gpu", "both"],
        Doc(
            description="cpu: a trie of all requests' text on the host; gpu: a match in each "
            "request's own tokens on a CUDA device, without waiting for the host; both: the trie, "
            "and the match for requests for which it has nothing"
        ),
    ] = "cpu"
    speculative_ngram_min_bfs_breadth: Annotated[int, Doc(description="least fan-out")] = 1
    speculative_ngram_max_bfs_breadth: Annotated[int, Doc(description="greatest fan-out")] = 10
    speculative_ngram_match_type: Annotated[
        Literal["BFS", "PROB"], Doc(description="children by recency (BFS) or frequency (PROB)")
    ] = "BFS"
    speculative_ngram_max_trie_depth: Annotated[
        int,
        Doc(
            description="tokens of the match window and of stored paths; a match on the device is "
            "one token shorter at most"
        ),
    ] = 18
    speculative_ngram_capacity: Annotated[int, Doc(description="nodes of the trie")] = 10_000_000
    speculative_ngram_external_corpus_path: Annotated[
        str | None, Doc(description="JSONL file of strings, loaded at start")
    ] = None
    speculative_ngram_external_sam_budget: Annotated[
        int,
        Doc(
            description="draft nodes reserved for external corpora, shared equally; of more "
            "corpora than nodes the first by name get one each"
        ),
    ] = 0
    speculative_ngram_external_corpus_max_tokens: Annotated[
        int, Doc(description="tokens of all external corpora together")
    ] = 10_000_000

    def num_draft_tokens(self, spec: DrafterSpec) -> int:
        """Nodes verified a request, the bonus token included, by a drafter without a model."""
        given = self.speculative_num_draft_tokens
        return spec.default_num_draft_tokens if given is None else given

    def shape(self, spec: DrafterSpec) -> SpecShape:
        """How much ``spec`` drafts a round; with a draft model only once it is resolved.

        Raises ValueError for a draft model of which the flags do not say it (see
        :func:`~outrider.engine_core.draft_source.find_draft`).
        """
        if not spec.has_model:
            width = self.num_draft_tokens(spec)
            return SpecShape(width - 1, 1, width)
        shape = given_shape(self)
        if not isinstance(shape, SpecShape):
            raise ValueError(f"{spec.name}: how much it drafts is not resolved: {shape}")
        return shape

    def with_shape(self, shape: SpecShape) -> "EngineConfig":
        """The same configuration, resolved: its flags say how much a draft model drafts."""
        return msgspec.structs.replace(
            self,
            speculative_num_steps=shape.steps,
            speculative_eagle_topk=shape.topk,
            speculative_num_draft_tokens=shape.num_draft_tokens,
        )

    @property
    def accept_rule(self) -> AcceptRule:
        """By which the drafts of sampled requests are accepted."""
        if self.speculative_use_block_verification:
            return "block"
        if self.speculative_use_rejection_sampling:
            return "rejection"
        return "threshold" if self.lossy else "coupled"

    @property
    def lossy(self) -> bool:
        """Whether sampled outputs are not of the target's distribution, by the user's wish."""
        single = self.speculative_accept_threshold_single
        return single < 1.0 or self.speculative_accept_threshold_acc < 1.0

    @property
    def draws_drafts(self) -> bool:
        """Whether sampled requests draw their drafts, which are accepted by both models' laws."""
        return self.accept_rule in DRAWING

    @property
    def simulated(self) -> bool:
        """Whether acceptance is forced, so that times mean something and texts do not."""
        return self.simulate_accept_length is not None or self.simulate_survival is not None

    def without_speculation(self) -> "EngineConfig":
        """The same engine with plain decoding, as a baseline."""
        plain = {f.name: f.default for f in msgspec.structs.fields(self) if is_speculation(f.name)}
        return msgspec.structs.replace(self, **plain)

    def ngram(self) -> NgramConfig:
        """The NGRAM drafter's part."""
        return NgramConfig(
            num_draft_tokens=self.num_draft_tokens(NGRAM),
            min_bfs_breadth=self.speculative_ngram_min_bfs_breadth,
            max_bfs_breadth=self.speculative_ngram_max_bfs_breadth,
            match_type=self.speculative_ngram_match_type,
            max_trie_depth=self.speculative_ngram_max_trie_depth,
            capacity=self.speculative_ngram_capacity,
            external_sam_budget=self.speculative_ngram_external_sam_budget,
            external_corpus_max_tokens=self.speculative_ngram_external_corpus_max_tokens,
        )


class CoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the core runs with, resolved once from the user's wishes and the worker's sizes.

    ``draft_width``: most query tokens of a verify row by the drafter (1 without one); a grammar
    has its rows up to ``verify_width``. ``draft_reach``:
    tokens from the row's first on whose KV a step may write: a verify row's, or those that a draft
    tree's levels take in the draft's pool, whichever are more.
    ``draft_topk``: branches of the tree that a drafter on the device makes; 1 for chains.
    ``ragged``: which of the drafts are verified. ``window_pool``: the draft's own pages, where it
    keeps a window alone.
    """

    engine: EngineConfig
    worker: WorkerInfo
    drafter: DrafterSpec | None
    draft_width: int
    draft_reach: int
    context_length: int
    max_running_requests: int
    chunk_tokens: int
    draft_topk: int = 1
    ragged: RaggedVerify = RaggedVerify()
    window_pool: WindowPool | None = None

    @property
    def verify_width(self) -> int:
        """Most query tokens of a verify row, whoever drafts."""
        return verify_width(self.engine, self.draft_width)

    @property
    def forced_drafts(self) -> int | None:
        """Drafts that grammars may force upon all rows of a step together; None: no limit."""
        return forced_drafts(self.engine, self.draft_width)

    @property
    def drafts_forced(self) -> bool:
        """Whether rows have what grammars force instead of other drafts.

        Not where each draft has a confidence by which lengths are planned.
        """
        return may_have_grammars(self.engine) and not self.ragged.planned

    @property
    def kv_reach(self) -> int:
        """``draft_reach`` of a drafter that keeps its KV in the target's pages; else 0."""
        shared = self.drafter is not None and self.drafter.draft_kv is DraftKV.SHARED_SLOTS
        return self.draft_reach if shared else 0

    @property
    def recomputes_last(self) -> bool:
        """Whether the last position of a cached prefix is computed again (see ``Admission``)."""
        return self.drafter is not None and self.drafter.shifts_tokens


def refuse_config(config: EngineConfig) -> Refused | None:
    """Check a configuration by itself, before anything is loaded."""
    for field in config.__struct_fields__:
        value: object = getattr(config, field)
        if value == "":
            return Refused(field, "must not be empty; leave it out instead")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            return Refused(field, f"must fit into 64 bits, signed, got {value}")
    checks: tuple[tuple[str, bool, str], ...] = (
        ("page_size", config.page_size in (1, 16, 32, 64), "must be 1, 16, 32 or 64"),
        (
            "mem_fraction_static",
            config.mem_fraction_static is None or 0.0 < config.mem_fraction_static < 1.0,
            "must be between 0 and 1",
        ),
        (
            "max_running_requests",
            1 <= config.max_running_requests <= MAX_RUNNING_REQUESTS,
            f"must be between 1 and {MAX_RUNNING_REQUESTS}",
        ),
        (
            "max_queued_requests",
            config.max_queued_requests is None or config.max_queued_requests >= 1,
            "must be 1 or more; leave it out for no limit",
        ),
        (
            "max_total_tokens",
            config.max_total_tokens is None or config.max_total_tokens >= config.page_size,
            "must hold at least one page",
        ),
        (
            "chunked_prefill_size",
            config.chunked_prefill_size == -1 or 1 <= config.chunked_prefill_size < 2**31,
            "must be -1 (no chunks) or between 1 and 2147483647",
        ),
        (
            "context_length",
            config.context_length is None or config.context_length >= 2,
            "must be 2 or more",
        ),
        (
            "priority_preemption_threshold",
            config.priority_preemption_threshold >= 0,
            "must be 0 or more",
        ),
        (
            "cuda_graph_max_bs",
            config.cuda_graph_max_bs is None or config.cuda_graph_max_bs >= 1,
            "must be 1 or more; leave it out for all running requests",
        ),
        ("stream_interval", config.stream_interval >= 1, "must be 1 or more"),
        (
            "tp_size",
            1 <= config.tp_size <= MAX_TP_SIZE,
            f"must be between 1 and {MAX_TP_SIZE}",
        ),
        (
            "num_threads",
            config.num_threads is None or config.num_threads >= 1,
            "must be 1 or more; leave it out to have it measured",
        ),
        (
            "grammar_threads",
            config.grammar_threads is None or 1 <= config.grammar_threads <= available_cores(),
            f"must be between 1 and the {available_cores()} available cores",
        ),
    )
    for field, ok, reason in checks:
        if not ok:
            return Refused(field, f"{reason}, got {getattr(config, field)}")
    if (
        config.priority_preemption_threshold != PREEMPTION_THRESHOLD
        and not config.enable_priority_scheduling
    ):
        return Refused(
            "priority_preemption_threshold",
            "needs --enable-priority-scheduling; set it or leave this out",
        )
    if config.disable_cuda_graph and config.cuda_graph_max_bs is not None:
        return Refused("cuda_graph_max_bs", "contradicts --disable-cuda-graph; leave one out")
    if config.skip_tokenizer_init and config.tokenizer_path is not None:
        return Refused("tokenizer_path", "contradicts --skip-tokenizer-init; leave one out")
    if config.device != "auto":
        refused = refuse_on(config, config.device)
        if refused is not None:
            return refused
    refused = refuse_processors(config.logits_processors, config.tp_size)
    return refused or refuse_speculation(config)


def served_context(config: EngineConfig, longest: int) -> int | Refused:
    """Most tokens of a request; ``longest``: of the model."""
    if config.context_length is None:
        return longest
    if config.context_length > longest:
        reason = f"{config.context_length} exceeds the model's {longest}; ask for less"
        return Refused("context_length", reason)
    return config.context_length


def resolve_config(config: EngineConfig, worker: WorkerInfo) -> CoreConfig | Refused:
    """Resolve the user's configuration against the worker's sizes."""
    refused = refuse_config(config)
    if refused is not None:
        return refused
    drafter: DrafterSpec | None = None
    if config.speculative_algorithm is not None:
        found = find_drafter(config.speculative_algorithm)
        if isinstance(found, Refused):
            return found
        drafter = found
        if found is NGRAM:
            drafter = NGRAM_BY_SOURCE[config.speculative_ngram_source]
        elif found.has_model and not worker.draft_survival:
            drafter = msgspec.structs.replace(found, gives_survival=False)
    context = served_context(config, worker.context_length)
    if isinstance(context, Refused):
        return context
    running = min(config.max_running_requests, worker.max_slots)
    chunk = config.chunked_prefill_size
    shape = PLAIN if drafter is None else config.shape(drafter)
    width, graphs = shape.num_draft_tokens, worker.device == "cuda"
    sizes = verify_tokens(config, width) if graphs else ()
    ragged = read_ragged(config, drafter, width - 1, shape.topk, sizes)
    if isinstance(ragged, Refused):
        return ragged
    pool: WindowPool | None = None
    if drafter is not None:
        pool = window_pool(config, context, worker.page_size, shape.num_draft_tokens)
        if pool is not None:
            drafter = msgspec.structs.replace(drafter, draft_kv=DraftKV.WINDOW_POOL)
    return CoreConfig(
        engine=config,
        worker=worker,
        drafter=drafter,
        draft_width=shape.num_draft_tokens,
        draft_reach=draft_reach(shape),
        draft_topk=shape.topk,
        ragged=ragged,
        window_pool=pool,
        context_length=context,
        max_running_requests=running,
        chunk_tokens=2**31 - 1 if chunk == -1 else chunk,
    )
