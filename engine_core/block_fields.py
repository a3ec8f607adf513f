"""What a block draft's config.json says, wherever its exporter wrote it (1.13 and 2.4).

z-lab and SpecForge write ``dflash_config`` or ``dspark_config`` beside the layers' fields, drafts
that come with their target ``dspark_`` in front of top-level names, speculators its own schema.
"""

from collections.abc import Iterator, Mapping
from typing import Literal, TypeVar

import msgspec

from .draft_fields import SpeculatorsConfig
from .field_errors import describe

T = TypeVar("T")
Json = dict[str, msgspec.Raw]
BlockAlgorithm = Literal["DFLASH", "DSPARK"]

# Any of them in a target's config.json says that a DSPARK draft comes with it.
BUNDLED = (
    "dspark_block_size",
    "dspark_markov_rank",
    "dspark_noise_token_id",
    "dspark_target_layer_ids",
)
_ALIASES = {"dspark_mask_token_id": "dspark_noise_token_id"}
_NESTED: dict[BlockAlgorithm, tuple[str, ...]] = {
    "DFLASH": ("dflash_config",),
    "DSPARK": ("dspark_config", "dflash_config"),  # the first wins where both say something
}


class BlockFields:
    """The fields by their plain names; null counts as unsaid."""

    def __init__(self, text: bytes, algorithm: BlockAlgorithm) -> None:
        """Raises ValueError naming a field; msgspec.MsgspecError for what is no object."""
        top = said(text)
        self.top = top
        self.algorithm = algorithm
        self.speculators = _value("", "speculators_model_type", top, str)
        self.prefixed = algorithm == "DSPARK" and any(name in top for name in BUNDLED)
        proposal = _value("", "speculators_config", top, SpeculatorsConfig)
        self.proposed = None if proposal is None else proposal.proposed_tokens()
        self._nested = [(f"{n}.", _object(top, n)) for n in _NESTED[algorithm] if n in top]
        inner = "text_config" if self.speculators is None else "transformer_layer_config"
        if self.speculators is not None and inner not in top:
            raise ValueError(
                f"{inner}: missing beside speculators_model_type; write the layers' fields there"
            )
        text_config = _object(top, inner) if inner in top else {}
        self._inner = (f"{inner}.", text_config)
        self.layers: Json = text_config if self.speculators is not None else top | text_config

    def find(self, name: str, kind: type[T]) -> T | None:
        """The first that is said: with a prefix, nested, of the text config, at the top."""
        return next((value for _, value in self._all(name, kind)), None)

    def agreed(self, name: str, kind: type[T]) -> T | None:
        """As ``find``, where different exporters write it to different places: all must agree."""
        found = list(self._all(name, kind))
        for place, value in found[1:]:
            if value != found[0][1]:
                raise ValueError(
                    f"{place}: {value!r} contradicts {found[0][0]} {found[0][1]!r}; say the one "
                    "that the draft was trained with"
                )
        return found[0][1] if found else None

    def nested(self, name: str, kind: type[T]) -> T | None:
        """What ``dflash_config`` or ``dspark_config`` says; other places do not count."""
        found = (_value(place, name, json, kind) for place, json in self._nested)
        return next((value for value in found if value is not None), None)

    def _all(self, name: str, kind: type[T]) -> Iterator[tuple[str, T]]:
        places: list[tuple[str, Mapping[str, msgspec.Raw], str]] = []
        if self.algorithm == "DSPARK":
            prefixed = f"dspark_{name}"
            places.append(("", self.top, _ALIASES.get(prefixed, prefixed)))
        places += [(place, json, name) for place, json in self._nested]
        places += [(*self._inner, name), ("", self.top, name)]
        for place, json, called in places:
            value = _value(place, called, json, kind)
            if value is not None:
                yield f"{place}{called}", value


def said(text: bytes) -> Json:
    """The fields of a JSON object, without those that are null. Raises msgspec.MsgspecError."""
    raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    return {name: value for name, value in raw.items() if bytes(value) != b"null"}


def _object(json: Mapping[str, msgspec.Raw], name: str) -> Json:
    try:
        return said(bytes(json[name]))
    except msgspec.MsgspecError as error:
        raise ValueError(describe(error, bytes(json[name]), name)) from None


def _value(place: str, name: str, json: Mapping[str, msgspec.Raw], kind: type[T]) -> T | None:
    if name not in json:
        return None
    try:
        return msgspec.json.decode(json[name], type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(describe(error, bytes(json[name]), f"{place}{name}")) from None
