"""Steps by hand: plans for a few requests, each with its own pages, straight into a runner."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from outrider.engine.forward_batch import ForwardBatch
from outrider.engine.future_map import FutureMap
from outrider.engine.kv_pool import KVPool
from outrider.engine.models import Model
from outrider.engine.step import StepRunner
from outrider.engine_core.ids import RowKind, i32
from outrider.engine_core.model_config import ModelConfig
from outrider.engine_core.plan import HostDrafts, SlotInit, StepPlan, StepResult
from outrider.engine_core.sampling_params import SamplingParams

from .tiny import bigram_config

CPU = torch.device("cpu")


def int32(values: Sequence[int]) -> bytes:
    return np.array(values, dtype=np.int32).tobytes()


@dataclass
class Drafts:
    """Draft nodes of one row; parents as in ``HostDrafts`` (0 is the bonus token)."""

    tokens: list[int]
    parents: list[int]


def chain(tokens: Sequence[int]) -> Drafts:
    return Drafts(list(tokens), list(range(len(tokens))))


class BigramModel:
    """Logits depend on the query token alone: ``table`` float32[V, V] by token."""

    weight_bytes = 1
    dtype = torch.float32

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        return batch.input_ids[:, None].float()

    def forward_capture(
        self, batch: ForwardBatch, kv: KVPool, capture_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("no drafter reads hidden states here")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.table[hidden[:, 0].long()]


class Driver:
    """Requests in slots 0, 1, …; page tables are permutations, so that order matters."""

    def __init__(
        self,
        model: Model,
        config: ModelConfig,
        slots: int = 8,
        page_size: int = 4,
        max_tokens: int = 256,
        accept_length: float | None = None,
    ) -> None:
        self.pages = -(-max_tokens // page_size)
        self.kv = KVPool(slots * self.pages, page_size, config, torch.float32, CPU)
        self.state = FutureMap(slots, self.pages, config.vocab_size, CPU)
        self.runner = StepRunner(model, self.kv, self.state, config.vocab_size, accept_length)
        self.step = 0
        order = torch.randperm(slots * self.pages, generator=torch.Generator().manual_seed(1)) + 1
        self._order = order.view(slots, self.pages).tolist()

    def enter(
        self,
        slot: int,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int = 0,
        eos_ids: tuple[int, ...] = (),
        output: Sequence[int] = (),
    ) -> int:
        """Prefill prompt and output in two chunks where possible; returns the first new token."""
        tokens = [*prompt, *output]
        init = SlotInit(slot, 1, params, seed, int32(prompt), int32(output), 0, eos_ids)
        half = len(tokens) // 2
        if half:
            self.run(self.chunk(slot, RowKind.PREFILL, 0, tokens[:half], init))
        last = self.chunk(slot, RowKind.PREFILL_LAST, half, tokens[half:], None if half else init)
        result = self.run(last)
        return int(i32(result.tokens)[0])

    def enter_copying(
        self, slot: int, owner: int, matched: int, prompt: Sequence[int], params: SamplingParams
    ) -> int:
        """Prefill a prompt of which ``owner``'s pages have ``matched`` tokens, whole pages.

        All but the last are shared; that one is copied, and its last position computed again.
        """
        shared = matched // self.kv.page_size - 1
        own, others = self._order[slot], self._order[owner]
        copies = ((others[shared], own[shared]),)
        start = matched - 1
        init = SlotInit(slot, 1, params, 0, int32(prompt), b"", start, (), copies)
        plan = self.chunk(slot, RowKind.PREFILL_LAST, start, prompt[start:], init)
        pages = int32([*others[:shared], *own[shared:]])
        result = self.run(msgspec.structs.replace(plan, page_ids=pages))
        return int(i32(result.tokens)[0])

    def chunk(
        self, slot: int, kind: RowKind, start: int, tokens: Sequence[int], init: SlotInit | None
    ) -> StepPlan:
        pages = self._order[slot] if init else []
        return StepPlan(
            step=self.step,
            late_bound=False,
            slots=int32([slot]),
            kinds=bytes([kind]),
            q_caps=int32([len(tokens)]),
            starts=int32([start]),
            tokens=int32(tokens),
            inits=(init,) if init else (),
            page_slots=int32([slot] * len(pages)),
            page_indexes=int32(range(len(pages))),
            page_ids=int32(pages),
        )

    def verify(self, rows: Mapping[int, Drafts | None]) -> tuple[dict[int, list[int]], StepResult]:
        """One verify step; emitted tokens by slot, and the result."""
        plan, drafts = self.verify_plan(rows)
        result = self.run(plan, drafts)
        cuts = np.cumsum(i32(result.accept_lens))[:-1]
        emitted = np.split(i32(result.tokens), cuts)
        return {slot: tokens.tolist() for slot, tokens in zip(rows, emitted, strict=True)}, result

    def verify_plan(self, rows: Mapping[int, Drafts | None]) -> tuple[StepPlan, HostDrafts | None]:
        counts = [len(drafts.tokens) if drafts else 0 for drafts in rows.values()]
        given = [drafts for drafts in rows.values() if drafts]
        plan = StepPlan(
            step=self.step,
            late_bound=bool(given),
            slots=int32(list(rows)),
            kinds=bytes([RowKind.VERIFY] * len(rows)),
            q_caps=int32([count + 1 for count in counts]),
            starts=int32([-1] * len(rows)),
            tokens=b"",
            inits=(),
            page_slots=b"",
            page_indexes=b"",
            page_ids=b"",
        )
        if not given:
            return plan, None
        return plan, HostDrafts(
            self.step,
            int32(counts),
            int32([token for drafts in given for token in drafts.tokens]),
            int32([parent for drafts in given for parent in drafts.parents]),
        )

    def verify_beside_prompt(
        self, rows: Mapping[int, Drafts], slot: int, prompt: Sequence[int], params: SamplingParams
    ) -> StepResult:
        """One step of verify rows and of a new request's whole prompt."""
        verify, drafts = self.verify_plan(rows)
        assert drafts is not None
        init = SlotInit(slot, 2, params, 0, int32(prompt), b"", 0, ())
        chunk = self.chunk(slot, RowKind.PREFILL_LAST, 0, prompt, init)
        return self.run(*self.joined(verify, drafts, [chunk]))

    def joined(
        self, verify: StepPlan, drafts: HostDrafts | None, chunks: Sequence[StepPlan]
    ) -> tuple[StepPlan, HostDrafts | None]:
        """One step of verify rows and of what the other plans prefill."""
        plans = [verify, *chunks]

        def field(name: str) -> bytes:
            return b"".join(getattr(plan, name) for plan in plans)

        plan = StepPlan(
            verify.step,
            drafts is not None,
            field("slots"),
            field("kinds"),
            field("q_caps"),
            field("starts"),
            field("tokens"),
            tuple(init for plan in plans for init in plan.inits),
            field("page_slots"),
            field("page_indexes"),
            field("page_ids"),
        )
        if drafts is None:
            return plan, None
        counts = drafts.counts + int32([0] * len(chunks))
        return plan, HostDrafts(drafts.step, counts, drafts.tokens, drafts.parents)

    @torch.inference_mode()
    def run(self, plan: StepPlan, drafts: HostDrafts | None = None) -> StepResult:
        self.step += 1
        return self.runner.run(plan, drafts)

    def kv_of(self, slot: int) -> torch.Tensor:
        """[layers, 2, tokens, heads, head_dim]: the KV of the slot's sequence, in order."""
        length = int(self.state.seq_lens[slot])
        index = torch.arange(length)
        pages = self.state.page_table[slot][index // self.kv.page_size].long()
        return self.kv.data[:, :, pages * self.kv.page_size + index % self.kv.page_size]


def bigram_driver(table: torch.Tensor, slots: int = 8) -> Driver:
    return Driver(BigramModel(table), bigram_config(table.shape[0]), slots)
