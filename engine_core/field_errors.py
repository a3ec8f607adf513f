"""What is wrong with a field of a JSON file: its name, its value and what to do."""

import contextlib

import msgspec

_SHOWN = 60


def describe(error: msgspec.MsgspecError, text: bytes, place: str = "") -> str:
    """A decoding error of ``text`` as a sentence; ``place``: the field that ``text`` is of, empty
    for a whole file.
    """
    reason, _, path = str(error).partition(" - at `$")
    field = f"{place}{path.rstrip('`')}".lstrip(".")
    if not isinstance(error, msgspec.ValidationError):
        return f"{field + ': ' if field else ''}{error}; correct it"
    missing = reason.removeprefix("Object missing required field `")
    if missing != reason:
        name = missing.rstrip("`")
        return f"{field + '.' if field else ''}{name}: missing; write it"
    shown = _shown(text, path.rstrip("`"))
    return f"{field + ': ' if field else ''}{reason}{shown}; correct it"


def _shown(text: bytes, path: str) -> str:
    """``, is 3``: the value at ``path`` (``.a.b``); nothing where it cannot be found."""
    with contextlib.suppress(msgspec.MsgspecError, KeyError):
        for name in path.partition("[")[0].split(".")[1:]:
            text = bytes(msgspec.json.decode(text, type=dict[str, msgspec.Raw])[name])
        shown = text.decode()
        return f", is {shown if len(shown) <= _SHOWN else shown[: _SHOWN - 1] + '…'}"
    return ""
