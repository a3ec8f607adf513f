"""What acceptance by position says of a drafter, in plain words."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from ...engine_core.draft_finding import Finding

_CHECK = "acceptance"
_ENOUGH = 30  # drafts of a position whose rate is spoken of
_NONE, _LOW, _SURE = 0.05, 0.30, 0.98
_COLLAPSE, _LATE = 0.5, 1.6  # a position's rate over the one's before it
_DECAY, _FLAT = 0.8, 0.9  # the last position's rate over the first one's
_LOOPS = 0.5  # share of outputs that go round in circles

# Where to look when even the first position is hardly ever right.
_WRONG = {
    "EAGLE3": "wrong layers captured (eagle_aux_hidden_state_layer_ids counts outputs, from 0), "
    "features and tokens not shifted by one, d2t of another run, another tokenizer, or another "
    "target",
    "EAGLE": "features and tokens not shifted by one, fc fed the other way round, another "
    "tokenizer, or another target",
    "DFLASH": "wrong layers captured (target_layer_ids counts outputs, from 0), another mask "
    "token, rows trained to stand for the next token (that is DSPARK's), another tokenizer, or "
    "another target",
    "DSPARK": "wrong layers captured (target_layer_ids counts outputs, from 0), another mask "
    "token, sample_from_anchor the other way round, another tokenizer, or another target",
    "STANDALONE": "another tokenizer, or weights that do not belong to this config.json",
}
_SELF = (
    "the first position, which sees the target, is right and what the draft feeds itself is not: "
    "its recurrent hidden state is taken on the wrong side of a norm (try norm_output of its "
    "config.json the other way round), or it was trained for one step only"
)
_BLOCK = (
    "the first position, which the bonus token stands before, is right and those behind it are "
    "not: another mask token, layers that look ahead in the block or do not (layer_types, "
    "is_causal), or another Markov head"
)


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """Drafts at one depth: ``rate`` of them were accepted; ``given``: of those whose predecessors
    were, None where that are none.
    """

    position: int
    drafted: int
    accepted: int
    rate: float
    given: float | None


class Run(NamedTuple):
    """What the drafting run gave. ``ended``: outputs that may have cut their last drafts;
    ``known``: share of the output's tokens that the draft can propose.
    """

    algorithm: str
    has_model: bool
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    ended: int
    looping: int
    outputs: int
    known: float | None


def positions(drafted: tuple[int, ...], accepted: tuple[int, ...]) -> tuple[Position, ...]:
    """Rates by depth, from counts that may be longer for drafts than for what was accepted."""
    found: list[Position] = []
    before = 1.0
    for index, tries in enumerate(drafted):
        if not tries:
            break
        hits = accepted[index] if index < len(accepted) else 0
        rate = hits / tries
        given = min(1.0, rate / before) if before else None
        found.append(
            Position(position=index + 1, drafted=tries, accepted=hits, rate=rate, given=given)
        )
        before = rate
    return tuple(found)


def diagnose(run: Run) -> Iterator[Finding]:
    """The findings of a run; the first one is about acceptance as such."""
    table = positions(run.drafted, run.accepted)
    if not table or table[0].drafted < _ENOUGH:
        yield _too_few(run, table)
    else:
        yield _judge(run, _conditional(table))
    if run.looping > _LOOPS * run.outputs:
        yield Finding(
            "outputs",
            "warning",
            f"{run.looping} of {run.outputs} outputs end in a short cycle, which any draft guesses",
            "acceptance on them is flattering: give --prompts of your own kind of text",
        )
    if run.known is not None:
        yield _coverage(run.known)


def _conditional(table: tuple[Position, ...]) -> list[float]:
    """Rates given that the position before held, while enough rows got there to speak of it."""
    rates: list[float] = []
    reached = table[0].drafted
    for position in table:
        if position.given is None or reached < _ENOUGH:
            break
        rates.append(position.given)
        reached = position.accepted
    return rates


def _too_few(run: Run, table: tuple[Position, ...]) -> Finding:
    drafts = table[0].drafted if table else 0
    if run.has_model and not drafts:
        return Finding(
            _CHECK,
            "failed",
            "nothing was drafted",
            "the context or the outputs may leave no room: lower the steps, or give other prompts",
        )
    return Finding(
        _CHECK,
        "warning",
        f"only {drafts} rows had a draft, too few to judge",
        "give more --prompts or --max-new-tokens" + ("" if run.has_model else _REPEATS),
    )


_REPEATS = "; n-gram drafts live on text that repeats its prompt"


def _judge(run: Run, rates: list[float]) -> Finding:
    first, missed = rates[0], run.drafted[0] - sum(run.accepted[:1])
    all_held = all(
        tries - hits <= run.ended
        for tries, hits in zip(run.drafted, (*run.accepted, *[0] * 64), strict=False)
    )
    if all_held and missed <= run.ended:
        return _identical(run)
    shown = " ".join(f"{rate:.2f}" for rate in rates)
    if first < _NONE:
        return _near_zero(run, shown)
    if len(rates) > 1 and run.has_model:
        if rates[1] < _COLLAPSE * first:
            causes = _BLOCK if run.algorithm in ("DFLASH", "DSPARK") else _SELF
            return Finding(
                _CHECK, "warning", f"collapses behind the first position: {shown}", causes
            )
        if rates[1] > _LATE * first:
            return Finding(
                _CHECK,
                "warning",
                f"implausible: the first position is the worst: {shown}",
                "the draft goes on well from its own hidden state but reads the target's badly: "
                "check the captured layers, their order, and the norms before fc",
            )
    if first < _LOW and run.has_model:
        return Finding(
            _CHECK,
            "warning",
            f"low from the first position on: {shown}",
            "the draft knows this target a little: was it trained for another fine-tune, another "
            "chat format or another kind of text, or for too short a time",
        )
    return Finding(_CHECK, "ok", _shape(rates, shown, run.has_model))


def _identical(run: Run) -> Finding:
    if not run.has_model:
        return Finding(_CHECK, "ok", "exactly 1.0: these outputs repeat what came before")
    return Finding(
        _CHECK,
        "warning",
        "exactly 1.0 at every position: the draft decides whatever the target does",
        "usually draft and target are the same weights, which costs more than it saves; or the "
        "outputs are trivial",
    )


def _near_zero(run: Run, shown: str) -> Finding:
    if not run.has_model:
        return Finding(
            _CHECK,
            "warning",
            f"near zero: {shown}",
            "these texts do not repeat themselves; n-gram drafts are for those that do",
        )
    causes = _WRONG.get(run.algorithm, "the drafter's state does not follow the text")
    return Finding(_CHECK, "failed", f"near zero: {shown}", f"usual causes: {causes}")


def _shape(rates: list[float], shown: str, has_model: bool) -> str:
    if len(rates) < 2:
        return f"{shown} at the first position; too few drafts got further to speak of them"
    share = rates[-1] / rates[0]
    if not has_model:
        return f"by position: {shown}"
    if share < _DECAY:
        return (
            f"decays with position: {shown}; usual for drafts that learned from true text alone, "
            "and a reason for fewer steps"
        )
    if share < _FLAT:
        return f"decays slowly: {shown}; usual"
    return f"flat: {shown}; the draft goes on as well from its own tokens as from the target's"


def _coverage(known: float) -> Finding:
    found = f"{known:.1%} of the output's tokens are among those the draft can propose"
    if known >= 0.95:
        return Finding("draft vocabulary", "ok", found)
    return Finding(
        "draft vocabulary",
        "warning",
        f"{found}, and no draft gets past the others",
        "rank the draft's vocabulary on text like yours when training it",
    )


def loops(tokens: list[int], longest: int = 8, tail: int = 32) -> bool:
    """Whether the last ``tail`` tokens repeat a cycle of at most ``longest``."""
    end = tokens[-tail:]
    return len(end) == tail and any(
        end[period:] == end[:-period] for period in range(1, longest + 1)
    )
