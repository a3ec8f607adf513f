"""Where a grammar allows one continuation only: how many of its tokens a step may draft."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import EngineConfig

# Query tokens of a row without any drafter. In texts of this project's schemas 94 of 100 forced
# runs fit behind the bonus token of such a row; longer ones go on in the next step.
FORCED_WIDTH = 12


def may_have_grammars(config: "EngineConfig") -> bool:
    """Whether requests may come with grammars, as far as the flags say it."""
    return config.tp_size == 1 and not config.skip_tokenizer_init


def verify_width(config: "EngineConfig", draft_width: int) -> int:
    """Most query tokens of a verify row: ``draft_width`` those of the drafter, 1 without any."""
    if draft_width > 1 or not may_have_grammars(config):
        return draft_width
    return FORCED_WIDTH
