"""What a step on the device asks of a drafter that runs there, inside the step's CUDA graph."""

from typing import NamedTuple, Protocol, runtime_checkable

import torch

from ...engine_core.config import EngineConfig
from ...engine_core.draft_config import SpecShape
from ...engine_core.plan import SlotInit
from ..forward_batch import ForwardBatch
from ..kv_pool import KVPool
from ..models import Model
from ..models.block_net import BlockNet
from ..models.draft_net import DraftNet
from ..window_pages import WindowPages
from .draft_law import DraftLaw, DraftNoise


class LoadedDraft(NamedTuple):
    """A draft model in memory: its network, its KV and how much it drafts a round.

    ``kv`` has as many pages as the target's pool; a page number means the same tokens in both.
    """

    net: DraftNet
    kv: KVPool
    shape: SpecShape


class LoadedBlock(NamedTuple):
    """As LoadedDraft, of a draft that proposes whole blocks.

    ``window``: where ``kv`` has which tokens, if it is a window's pool with pages of its own.
    """

    net: BlockNet
    kv: KVPool
    shape: SpecShape
    window: WindowPages | None = None


LoadedModel = LoadedDraft | LoadedBlock


def loaded_model(
    net: DraftNet | BlockNet, kv: KVPool, shape: SpecShape, window: WindowPages | None = None
) -> LoadedModel:
    """A draft model in memory, as what its network makes it; ``window``: see LoadedBlock."""
    if isinstance(net, BlockNet):
        return LoadedBlock(net, kv, shape, window)
    return LoadedDraft(net, kv, shape)


def window_of(draft: LoadedModel | None) -> WindowPages | None:
    """That of a draft whose pages are not the target's."""
    return draft.window if isinstance(draft, LoadedBlock) else None


class DrafterContext(NamedTuple):
    """What a drafter is made for: ``slots`` slots, the spare one too, of ``length`` tokens each.

    ``page_table`` int32[slots, P]: the slots' pages as steps change them. ``target``: the model
    that decides, of ``layers`` layers and ``vocab_size`` tokens. ``draft``: the model of algorithms
    that have one.
    """

    config: EngineConfig
    slots: int
    length: int
    device: torch.device
    page_table: torch.Tensor
    target: Model
    layers: int
    vocab_size: int
    draft: LoadedModel | None = None


class DraftRows(NamedTuple):
    """R rows that segment D gives to the drafter, which fills their drafts.

    ``slots`` int32[R]; ``cu_q`` int32[R + 1] offsets of the rows' T query tokens; ``caps``
    int32[R]: nodes to draft behind the row's first token, 0 for rows that are not the drafter's.
    ``seq_lens`` int32[S]: the slots' state before the step. ``noise``: drafts are drawn with it,
    for rejection sampling; None where they are the likeliest tokens.

    To be written: ``tokens`` and ``parents`` int32[T] at those nodes (parents within the row, below
    their child; -1 and token 0 for padding, which is never accepted; padding comes last), and for
    all rows ``proposed`` and ``depths`` int32[R]: nodes that are no padding, and their depth.
    """

    slots: torch.Tensor
    cu_q: torch.Tensor
    caps: torch.Tensor
    seq_lens: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
    proposed: torch.Tensor
    depths: torch.Tensor
    noise: DraftNoise | None = None


class Verdict(NamedTuple):
    """What segment A decided of R rows, prefill chunks among them.

    ``accept_lens`` int32[R] emitted tokens; ``tokens`` int32[R, W], them; ``path`` int32[R, W], the
    rows' nodes at which they were decided; both -1 beyond. ``seq_lens`` int32[S]: the slots' state
    after the step, the place of the newest token. ``kinds`` int32[R] (RowKind) and ``starts``
    int32[R], the position of a row's first token. ``batch``: what the target ran, of T tokens; the
    KV of accepted nodes lies in sequence order by now. ``features`` [T, W]: what the drafter asked
    for of the target (see ``DeviceDrafter.feature_layers``); empty if it asked for nothing.
    """

    slots: torch.Tensor
    accept_lens: torch.Tensor
    tokens: torch.Tensor
    path: torch.Tensor
    seq_lens: torch.Tensor
    kinds: torch.Tensor
    starts: torch.Tensor
    batch: ForwardBatch
    features: torch.Tensor


@runtime_checkable
class DeviceDrafter(Protocol):
    """A drafter with state by slot, on the device of the target. No method waits for the device.

    ``propose`` and ``align`` only enqueue work of a size that the shapes of their arguments fix:
    on a GPU they are captured once a graph and replayed.
    """

    @property
    def feature_layers(self) -> tuple[int, ...] | None:
        """Of what the target's features are made, which ``align`` gets.

        Layers whose entering streams stand side by side, as ``Model.forward_capture`` counts
        them; () for the final hidden state; None for nothing.
        """

    def enter(self, init: SlotInit) -> None:
        """A request enters a slot; called before its first step is enqueued."""

    def propose(self, rows: DraftRows) -> DraftLaw | None:
        """Segment D: draft for the rows that have a cap. Not called for steps without any.

        With ``rows.noise``, which only drafters see whose spec says ``gives_q``, it returns what
        the drafts were drawn from; without, None.
        """

    def align(self, verdict: Verdict) -> None:
        """Segment A: bring the slots' state to what every step accepted."""

    def reset(self) -> None:
        """Forget every slot."""


@runtime_checkable
class SurvivalDrafter(DeviceDrafter, Protocol):
    """One that says how likely its drafts, chains of up to G, are to be accepted.

    Its DrafterSpec has ``gives_survival``. Asked only in ragged verify modes (engine_core's
    :mod:`~outrider.engine_core.ragged_verify`).
    """

    @property
    def confidence(self) -> torch.Tensor:
        """float32[R, G] of the latest ``propose``'s rows: draft k's raw logit, given that all
        before it are accepted. Anything beyond a row's drafts. Valid until the next ``propose``;
        may be read before the first one."""
