"""Typed refusals: what a boundary answers when it will not do what was asked."""

import msgspec


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """A request that will not be served, and why.

    ``field`` names what was wrong, ``reason`` says it in one sentence with the remedy, ``status``
    is the HTTP status that fits (400 bad input, 404 unknown, 413 too long, 501 not supported,
    503 try later).
    """

    field: str
    reason: str
    status: int = 400

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}"


class RefusedError(ValueError):
    """A :class:`Refused` as an exception, for the public Python APIs."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(str(refused))
        self.refused = refused
