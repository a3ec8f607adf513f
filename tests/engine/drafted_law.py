"""What draft models draft, judged by other rules than the coupled one: the joint law of tokens."""

from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from outrider.engine.speculative.draft_law import DraftDraw, DraftLaw
from outrider.engine_core.counters import Counters
from outrider.engine_core.draft_config import DraftAlgorithm, SpecShape

from ..reference import sampling_ref as ref
from .draft_checkpoints import write_eagle, write_eagle3, write_standalone
from .draft_cores import Models, draft_core
from .joint_law import WARM, behind_the_first, draw, folder_of, joint_of, p_value

CHAIN = SpecShape(3, 1, 4)
# No repetition penalty: the laws come from log-probabilities, whose signs are not the logits'.
FILTERED = ref.Params(
    temperature=1.5, top_k=4, top_p=0.8, min_p=0.05, presence=0.2,
    frequency=0.1, bias={2: 0.7},
)  # fmt: skip


BANNED = ref.Params(temperature=1.5, bans=((2, 3), (1, 4, 0), (5,)), allowed=(0, 2, 3, 4, 5, 1))
PROCESSED = ref.Params(temperature=1.5, two_back=2.0, presence=0.2)
WANTED = {"warm": WARM, "filtered": FILTERED, "banned": BANNED, "processed": PROCESSED}


class Drawn(NamedTuple):
    """The tokens behind the first of many requests, their law, and what was counted."""

    found: Counter[tuple[int, ...]]
    law: dict[tuple[int, ...], float]
    counters: Counters

    @property
    def p(self) -> float:
        """How unlikely the tokens are."""
        return p_value({cell: p for cell, p in self.law.items() if p > 0}, self.found)

    @property
    def accepted(self) -> float:
        """Drafts that a verify row had accepted, on average."""
        return self.counters.spec_accepted_tokens / self.counters.spec_drafts


@lru_cache
def models_of(folder: Path, vocab: int) -> Models:
    """Drafts that are right often enough, and wrong often enough."""
    target = folder_of(folder, vocab)
    return Models(
        target,
        {
            "STANDALONE": write_standalone(folder / f"standalone{vocab}", target, noise=1.0),
            "EAGLE": write_eagle(folder / f"eagle{vocab}", target),
            "EAGLE3": write_eagle3(folder / f"eagle3{vocab}", target, draft_vocab=vocab * 3 // 4),
        },
    )


@lru_cache
def law_of(folder: Path, vocab: int, length: int, name: str) -> dict[tuple[int, ...], float]:
    return behind_the_first(joint_of(folder, vocab, length, WANTED[name]))


def drawn(
    place: Path,
    algorithm: DraftAlgorithm,
    vocab: int,
    length: int,
    wanted: ref.Params = WARM,
    shape: SpecShape = CHAIN,
    /,
    **flags: object,
) -> Drawn:
    """``flags`` ask for the rule."""
    models = models_of(place, vocab)
    flags = {"max_running_requests": 256, "max_total_tokens": 16384, **flags}
    with draft_core(models, algorithm, shape, **flags) as made:
        found = Counter(tokens[1:] for tokens in draw(made.core, length, wanted))
        counters = made.core.scheduler.counters
    assert counters.spec_accepted_tokens > 1_000
    assert counters.spec_draft_tokens > 1.1 * counters.spec_accepted_tokens
    name = next(name for name, params in WANTED.items() if params is wanted)
    law = law_of(models.target, vocab, length, name)
    return Drawn(found, law, counters)


true_law = DraftDraw.law


def shifted(draw: DraftDraw) -> DraftLaw:
    """A fault: q of the next token."""
    law = true_law(draw)
    return law._replace(logits=law.logits.roll(1, dims=2))
