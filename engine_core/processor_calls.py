"""The custom logits processors that a request asks for: their names, each with its arguments."""

from collections.abc import Mapping

import msgspec

from .refusal import Refused

Calls = Mapping[str, Mapping[str, object]]  # JSON objects by processor
MAX_CALLS = 16
MAX_ARGUMENT_BYTES = 64 * 1024
_MOST_SAID = 500  # characters of an exception that a client is told


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


def said(error: BaseException) -> str:
    """An exception's text for a client, who need not have all of a long one."""
    try:
        text = str(error)
    except Exception as other:  # a plug-in's class may fail at that, too
        text = f"an exception whose text cannot be had ({type(other).__name__})"
    return text if len(text) <= _MOST_SAID else f"{text[:_MOST_SAID]} ..."
