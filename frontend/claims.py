"""Which public request ids are in flight, and which ids the core knows them by."""

from collections.abc import Mapping, Sequence

from ..engine_core.refusal import Refused, RefusedError
from .expand import child_rid

Name = tuple[str, str]  # scope, public id


class Claims:
    """Public ids in flight. A scope (HTTP, one SDK client) sees its own ids only."""

    def __init__(self) -> None:
        self.requests = 0  # claimed and not released
        self._held: dict[Name, Sequence[str]] = {}

    def claim(self, scope: str, requests: Sequence[tuple[str, Sequence[str]]]) -> "Claim":
        """Take the ids of some requests and of their samples, all or none.

        ``requests``: a public id and the core's ids of its samples each. Raises RefusedError for
        an id that is in flight or given twice.
        """
        names: dict[Name, Sequence[str]] = {}
        for rid, samples in requests:
            mine: dict[Name, Sequence[str]] = {
                (scope, child_rid(rid, i, len(samples))): [one] for i, one in enumerate(samples)
            }
            mine[scope, rid] = samples
            if any(name in self._held or name in names for name in mine):
                raise RefusedError(
                    Refused("rid", f"{rid!r} is in flight already; choose another id")
                )
            names |= mine
        self._held |= names
        self.requests += len(requests)
        return Claim(names, len(requests))

    def release(self, claim: "Claim") -> None:
        """Free the ids of a claim; once a claim."""
        for name in claim.names:
            del self._held[name]
        self.requests -= claim.requests

    def samples(self, scope: str, rid: str) -> Sequence[str]:
        """The core's ids behind a public id of a request or sample; none for an unknown one."""
        return self._held.get((scope, rid), ())


class Claim:
    """What one call has claimed."""

    def __init__(self, names: Mapping[Name, Sequence[str]], requests: int) -> None:
        self.names = names
        self.requests = requests
