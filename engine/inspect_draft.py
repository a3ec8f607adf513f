"""Reads a draft's weights for ``outrider doctor``: ``python -m outrider.engine.inspect_draft``.

Takes one ``EngineConfig`` line on standard input, answers with one ``DraftInspection`` line. All
that is wrong is found, where loading would stop at the first.
"""

import sys
from collections.abc import Iterator
from typing import Protocol

import msgspec
import torch

from ..engine_core.config import EngineConfig
from ..engine_core.draft_finding import Finding, failed
from ..engine_core.draft_inspection import DraftInspection, decode_config, encode_line
from ..engine_core.draft_source import DraftSource, find_draft
from ..engine_core.model_config import load_model_config
from ..engine_core.model_path import resolve_model
from ..engine_core.refusal import Refused, RefusedError
from ..engine_core.tensor_shapes import IGNORABLE, UNUSED
from .child_stdout import take_stdout
from .models.block_checkpoint import read_block, spare_names
from .models.decoder_weights import read_head, read_layer
from .models.draft_weights import DraftTensors, read_draft, read_token_ids
from .weights import Checkpoint, WeightsError

_SHOWN = 5
_COMPARE = "compare config.json with the checkpoint: another number of layers, or another format"


class _Tensors(Protocol):
    """What both kinds of checkpoint readers are."""

    def has(self, name: str) -> bool: ...

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor: ...


class Lenient:
    """A tensor source that goes on where ``source`` raises; zeros stand for what it lacks."""

    def __init__(self, source: _Tensors) -> None:
        self._source = source
        self.taken = 0
        self.problems: list[str] = []
        self.not_finite: list[str] = []

    def has(self, name: str) -> bool:
        """Whether ``name`` is there."""
        return self._source.has(name)

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor; what is wrong with it is noted."""
        try:
            tensor = self._source.take(name, shape)
        except WeightsError as error:
            self.problems.append(str(error))
            return torch.zeros(1).expand(shape)
        self.taken += 1
        if not bool(torch.isfinite(tensor).all()):
            self.not_finite.append(name)
        return tensor


def inspect(config: EngineConfig) -> DraftInspection:
    """Read the draft that ``config`` names, without its target. Raises RefusedError."""
    target = load_model_config(resolve_model(config.model, config.revision))
    source = find_draft(config, target)
    if source is None or source.load_format == "dummy":
        return DraftInspection()
    try:
        checkpoint = Checkpoint(source.folder)
        if source.config.algorithm == "STANDALONE":
            return DraftInspection(findings=tuple(_standalone(checkpoint, source)))
        if source.config.block is not None:
            return DraftInspection(findings=tuple(_block(checkpoint, source)))
        return _eagle(DraftTensors(checkpoint), source)
    except WeightsError as error:
        return DraftInspection(findings=(failed("weights", str(error)),))


def _standalone(checkpoint: Checkpoint, source: DraftSource) -> Iterator[Finding]:
    tensors, model = Lenient(checkpoint), source.config.model
    read_head(tensors, model)
    for index in range(model.num_hidden_layers):
        read_layer(tensors, model, index)
    yield from _weights(tensors, checkpoint, IGNORABLE)


def _block(checkpoint: Checkpoint, source: DraftSource) -> Iterator[Finding]:
    tensors = Lenient(DraftTensors(checkpoint))
    read_block(tensors, source.config)
    yield from _weights(tensors, checkpoint, spare_names(checkpoint, source.config))


def _eagle(checkpoint: DraftTensors, source: DraftSource) -> DraftInspection:
    tensors, config = Lenient(checkpoint), source.config
    read_draft(tensors, config)
    findings: list[Finding] = []
    ids: torch.Tensor | None = None
    if source.token_map is not None:
        ids = torch.tensor(source.token_map)
    elif config.algorithm == "EAGLE3":
        try:
            ids = read_token_ids(checkpoint, config)
        except WeightsError as error:
            findings.append(failed("draft vocabulary", str(error)))
        else:
            findings.append(_map_finding(checkpoint, ids))
    weights = tuple(_weights(tensors, checkpoint, (*UNUSED, *IGNORABLE)))
    known = None if ids is None else tuple(ids.tolist())
    return DraftInspection(findings=(*weights, *findings), draft_tokens=known)


def _map_finding(checkpoint: DraftTensors, ids: torch.Tensor | None) -> Finding:
    if ids is None:
        return Finding("draft vocabulary", "ok", "the target's own")
    both = "d2t and t2d agree" if checkpoint.has("t2d") else "d2t names different tokens, no t2d"
    return Finding("draft vocabulary", "ok", f"{both}: {len(ids)} of the target's tokens")


class _Finishing(Protocol):
    def finish(self, ignorable: tuple[str, ...]) -> None: ...


def _weights(
    tensors: Lenient, checkpoint: _Finishing, ignorable: tuple[str, ...]
) -> Iterator[Finding]:
    problems = list(tensors.problems)
    try:
        checkpoint.finish(ignorable)
    except WeightsError as error:
        problems.append(str(error))
    if problems:
        more = f"; {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        found = " / ".join(problem.replace("; ", ", ") for problem in problems[:_SHOWN])
        yield Finding("weights", "failed", found + more, _COMPARE)
    if tensors.not_finite:
        yield Finding(
            "weights",
            "failed",
            f"NaN or infinity in {', '.join(tensors.not_finite[:_SHOWN])}",
            "its training diverged, or the file is damaged: use an earlier checkpoint",
        )
    if not problems and not tensors.not_finite:
        yield Finding(
            "weights", "ok", f"{tensors.taken} tensors read, none missing, none left over"
        )


def main() -> int:
    """Run the process; returns its exit status."""
    answer_out = take_stdout()
    try:
        answer = inspect(decode_config(sys.stdin.buffer.readline()))
    except (msgspec.MsgspecError, ValueError) as error:
        refused = error.refused if isinstance(error, RefusedError) else Refused("", str(error))
        answer = DraftInspection(field=refused.field, message=refused.reason)
    with answer_out:
        answer_out.write(encode_line(answer))
    return 1 if answer.message else 0


if __name__ == "__main__":
    sys.exit(main())
