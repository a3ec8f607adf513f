"""The file of ``--speculative-token-map``: the target's token ids that EAGLE drafts from."""

from pathlib import Path

import msgspec

from .refusal import Refused

_FIELD = "speculative_token_map"


def read_token_map(path: str, vocab_size: int) -> tuple[int, ...] | Refused:
    """The ids of a JSON list, in its order: row i of the draft's head is the target's row ids[i].

    Refused: a file that cannot be read or is no such list (torch's .pt files are pickles, which
    are not opened), an empty list, an id twice or outside the vocabulary.
    """
    if path.endswith((".pt", ".pth", ".bin", ".pkl")):
        return Refused(
            _FIELD,
            f"{path!r} is a pickle, which may run code and is not opened; write its ids as a JSON "
            "list, e.g. with json.dump(torch.load(path).tolist(), file)",
        )
    try:
        ids = msgspec.json.decode(Path(path).expanduser().read_bytes(), type=tuple[int, ...])
    except OSError as error:
        return Refused(_FIELD, f"{path!r} cannot be read: {error.strerror}; give a local JSON file")
    except msgspec.MsgspecError as error:
        return Refused(_FIELD, f"{path!r} must hold a JSON list of token ids: {error}")
    if not ids:
        return Refused(_FIELD, f"{path!r} names no token; leave it out to draft from all of them")
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        reason = f"{path!r}: {wrong} is no id of the target's {vocab_size} tokens"
        return Refused(_FIELD, f"{reason}; give a map that was made for this target")
    if len(set(ids)) < len(ids):
        return Refused(_FIELD, f"{path!r} names a token twice; list every id once")
    return ids
