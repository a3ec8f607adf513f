"""Whether a draft and its target mean the same tokens by the same ids: tokenizer.json of both."""

from pathlib import Path

import msgspec

from .draft_finding import Finding, failed
from .tokenizer_ids import TokenizerFile, read_tokenizer

_CHECK = "tokenizer"
_SHOWN = 3


def match_tokenizers(target: Path, draft: Path, drafts_text: bool) -> Finding:
    """Compare the folders' vocabularies and merges.

    ``drafts_text``: the draft has an embedding of its own for every id, so that one without a
    tokenizer.json leaves open what they mean; the others read ids through the target's table.
    """
    own, theirs = target / "tokenizer.json", draft / "tokenizer.json"
    if not theirs.is_file():
        if drafts_text:
            return Finding(
                _CHECK,
                "warning",
                "the draft has no tokenizer.json, so that only the number of ids can be compared",
                "copy the tokenizer.json that it was trained with into its folder",
            )
        return Finding(_CHECK, "ok", "the draft has none of its own: the target's ids are meant")
    if not own.is_file():
        return Finding(_CHECK, "warning", f"{target} has no tokenizer.json to compare with")
    try:
        mine, other = read_tokenizer(target), read_tokenizer(draft)
    except (OSError, msgspec.MsgspecError) as error:
        return Finding(_CHECK, "warning", f"a tokenizer.json cannot be read: {error}")
    return _compare(mine, other)


def _compare(mine: TokenizerFile, other: TokenizerFile) -> Finding:
    ours, theirs = mine.ids(), other.ids()
    moved = [text for text, token in theirs.items() if ours.get(text) != token]
    if moved:
        shown = ", ".join(
            f"{text!r} is {ours.get(text, 'no token')} and {theirs[text]}"
            for text in moved[:_SHOWN]
        )
        return failed(
            _CHECK,
            f"{len(moved)} of the draft's {len(theirs)} tokens are not the target's: {shown} "
            "in target and draft; use a draft that was trained with the target's tokenizer",
        )
    if len(theirs) < len(ours):
        absent = sorted(set(ours) - set(theirs), key=ours.__getitem__)
        return Finding(
            _CHECK,
            "warning",
            f"the target has {len(absent)} tokens that the draft's tokenizer lacks, "
            f"{absent[0]!r} = {ours[absent[0]]} first",
            "harmless if they were added later; the draft never saw them in training",
        )
    if _merges(mine) != _merges(other):
        return Finding(
            _CHECK,
            "warning",
            f"the same {len(ours)} ids, but other merges: the draft saw texts cut differently",
            "compare both tokenizer.json; use the target's for training",
        )
    return Finding(_CHECK, "ok", f"{len(ours)} ids and the merges are the target's")


def _merges(tokenizer: TokenizerFile) -> list[tuple[str, ...]]:
    """As pairs: older files join them by a space."""
    return [
        tuple(merge.split(" ")) if isinstance(merge, str) else merge
        for merge in tokenizer.model.merges
    ]
