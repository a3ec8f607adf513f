"""Why a row of a step has no token."""

from ..engine_core.plan import RowError
from ..engine_core.refusal import Refused

_BAD_LOGITS = "the model gave NaN or infinite logits; check the weights and the dtype"


def row_error(row: int, refused: Refused | None) -> RowError:
    """The error of a row: what ``refused`` its request, or the model's numbers."""
    if refused is None:
        return RowError(row, _BAD_LOGITS)
    return RowError(row, str(refused), refused.status)
