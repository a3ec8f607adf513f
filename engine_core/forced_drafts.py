"""Where a grammar allows one continuation only: how many of its tokens a step may draft."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import EngineConfig

# Query tokens of a row without any drafter. In texts of this project's schemas 94 of 100 forced
# runs fit behind the bonus token of such a row; longer ones go on in the next step.
FORCED_WIDTH = 12


# And drafts of a step, for each request that may run, up to a number at which a GPU's matmuls
# begin to take longer for them. So memory need not be planned for all rows in full.
_FORCED_EACH = 2
_FORCED_MOST = 256


def may_have_grammars(config: "EngineConfig") -> bool:
    """Whether requests may come with grammars, as far as the flags say it."""
    return config.tp_size == 1 and not config.skip_tokenizer_init


def verify_width(config: "EngineConfig", draft_width: int) -> int:
    """Most query tokens of a verify row: ``draft_width`` those of the drafter, 1 without any."""
    if draft_width > 1 or not may_have_grammars(config):
        return draft_width
    return FORCED_WIDTH


def forced_drafts(config: "EngineConfig", draft_width: int) -> int | None:
    """Drafts that grammars may force upon all rows of a step together; None: no such limit, as all
    rows may have drafts of a drafter.
    """
    if verify_width(config, draft_width) == draft_width:
        return None
    return max(FORCED_WIDTH - 1, min(_FORCED_EACH * config.max_running_requests, _FORCED_MOST))
