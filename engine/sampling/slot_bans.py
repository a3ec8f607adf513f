"""The tokens that one request rules out after those before, on a CPU."""

from collections.abc import Sequence

import torch

from ...engine_core.ids import i32
from ...engine_core.sampling_params import SamplingParams


class SlotBans:
    """``always`` bool[V]: tokens that are ruled out at every position."""

    def __init__(
        self, params: SamplingParams, output: bytes, vocab_size: int, device: torch.device
    ) -> None:
        """``output``: int32 bytes of what was generated before."""
        self._after: dict[tuple[int, ...], list[int]] = {}
        for ban in params.bad_words_ids:
            self._after.setdefault(ban[:-1], []).append(ban[-1])
        self._lengths = sorted({len(before) for before in self._after} - {0})
        self._tail: list[int] = i32(output).tolist()[-self._longest :]
        allowed = params.allowed_token_ids
        self.always = torch.full((vocab_size,), allowed is not None, device=device)
        if allowed is not None:
            self.always[list(allowed)] = False
        self.always[self._after.get((), [])] = True

    @property
    def _longest(self) -> int:
        """Tokens that may matter to what follows; one at least, for slices."""
        return self._lengths[-1] if self._lengths else 1

    def push(self, tokens: Sequence[int]) -> None:
        """The request generated these."""
        self._tail = [*self._tail, *tokens][-self._longest :]

    def after(self, path: Sequence[int]) -> list[int]:
        """Tokens that may not follow the output so far and then the drafts ``path``."""
        if not self._lengths:
            return []
        recent = [*self._tail, *path]
        found: list[int] = []
        for length in self._lengths:
            if length <= len(recent):
                found += self._after.get(tuple(recent[-length:]), ())
        return found
