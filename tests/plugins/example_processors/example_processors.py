"""Logits processors as another package would write them."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from outrider.engine.logits_processor import ProcessorNodes
from outrider.engine_core.processor_loader import ProcessorContext


class Back(NamedTuple):
    back: int
    strength: float


class TwoBack:
    """Makes the token that stands ``back`` before a position less likely there, or rules it out."""

    def __init__(self, context: ProcessorContext) -> None:
        self.most = context.context_length

    def request(self, arguments: Mapping[str, object]) -> Back:
        unknown = sorted(arguments.keys() - {"back", "strength"})
        if unknown:
            raise ValueError(f"unknown argument {unknown[0]}; it takes back and strength")
        back, strength = arguments.get("back", 2), arguments.get("strength", float("inf"))
        if not isinstance(back, int) or not 1 <= back <= self.most:
            raise ValueError(f"back must be 1 to {self.most}, got {back!r}")
        if not isinstance(strength, int | float):
            raise ValueError(f"strength must be a number, got {strength!r}")
        return Back(back, float(strength))

    def apply(self, logits: torch.Tensor, nodes: ProcessorNodes) -> None:
        asked = [request for request in nodes.requests if isinstance(request, Back)]
        backs = np.array([request.back for request in asked])
        tokens = nodes.last(int(backs.max()))[np.arange(len(nodes)), -backs]
        rows = np.flatnonzero(tokens >= 0)
        less = torch.tensor([asked[row].strength for row in rows], device=logits.device)
        at = torch.from_numpy(rows).to(logits.device)
        logits[at, torch.from_numpy(tokens[rows]).to(logits.device)] -= less


class Count:
    """Behind each token only the next higher one is left."""

    def __init__(self, context: ProcessorContext) -> None:
        self.vocab_size = context.vocab_size

    def request(self, arguments: Mapping[str, object]) -> None:
        if arguments:
            raise ValueError("takes no arguments")

    def apply(self, logits: torch.Tensor, nodes: ProcessorNodes) -> None:
        following = torch.from_numpy((nodes.last(1) + 1) % self.vocab_size).to(logits.device)
        logits.fill_(-torch.inf).scatter_(1, following, 0.0)


class Impure:
    """What no processor may be: what it does depends on how often it was asked before."""

    def __init__(self, context: ProcessorContext) -> None:
        self.asked = 0

    def request(self, arguments: Mapping[str, object]) -> None:
        """Takes anything."""

    def apply(self, logits: torch.Tensor, nodes: ProcessorNodes) -> None:
        for node in range(len(nodes)):
            self.asked += 1
            logits[node, 5 + self.asked % 100] += 1000.0


class Misbehave:
    """Does something wrong at each history that holds the token ``at``, or at all of them.

    ``calls`` and ``most``: how often it was applied, and to how many nodes at once.
    """

    calls = most = 0

    def __init__(self, context: ProcessorContext) -> None:
        self.vocab_size = context.vocab_size

    def request(self, arguments: Mapping[str, object]) -> Mapping[str, object]:
        if arguments.get("how") == "refuse":
            raise RuntimeError("no licence")
        return arguments

    def apply(self, logits: torch.Tensor, nodes: ProcessorNodes) -> object:
        Misbehave.calls += 1
        Misbehave.most = max(Misbehave.most, len(nodes))
        answer = None
        logits += 1.0  # which must not stay where it then raises
        for node, request in enumerate(nodes.requests):
            assert isinstance(request, Mapping)
            at = request.get("at")
            if at is not None and at not in nodes.history(node)[nodes.prompt_lengths[node] :]:
                continue
            match request["how"]:
                case "raise":
                    raise KeyError(f"nothing for {len(nodes.history(node))}")
                case "exit":
                    raise SystemExit(3)
                case "nothing":
                    logits[node] = -torch.inf
                case "nan":
                    logits[node, 3] = torch.nan
                case "inf":
                    logits[node, 3] = torch.inf
                case "return":
                    answer = logits
                case "prefer":  # what the engine may have ruled out
                    logits[node, int(request["token"])] = 1000.0
                case _:
                    pass
        return answer
