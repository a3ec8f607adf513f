"""The custom logits processors that a request asks for: their names, each with its arguments."""

from collections.abc import Mapping

import msgspec

from .refusal import Refused

Calls = Mapping[str, Mapping[str, object]]  # JSON objects by processor
MAX_CALLS = 16
MAX_ARGUMENT_BYTES = 64 * 1024


def refuse_calls(calls: Calls) -> Refused | None:
    """Why no processor could take these, or None: too many, too much, or no JSON."""
    if not calls:
        return None
    if len(calls) > MAX_CALLS:
        return Refused("logits_processors", f"at most {MAX_CALLS} a request, got {len(calls)}")
    try:
        size = len(msgspec.json.encode(calls))
    except (TypeError, ValueError, RecursionError) as error:
        reason = f"arguments must be JSON: {error}"
        return Refused("logits_processors", reason)
    if size > MAX_ARGUMENT_BYTES:
        reason = f"arguments take {size} bytes as JSON; at most {MAX_ARGUMENT_BYTES} are taken"
        return Refused("logits_processors", reason)
    return None
