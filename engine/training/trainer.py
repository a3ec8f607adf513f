"""The loop: batches, steps, a schedule by steps or by time, selection, checkpoints."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from ...engine_core.train_spec import TrainSpec
from .accept_length import AgreementCounts, Projection
from .batches import Batch, Mixture, RowSource
from .checkpoint import Position, load_checkpoint, save_checkpoint
from .optimizer import Optimizer, rate_factor
from .progress import Progress
from .recipe import Recipe
from .world import World

Clock = Callable[[], float]


class Outcome(NamedTuple):
    """How a command ended: whether the schedule's end was reached, and where it stands."""

    finished: bool
    position: Position
    tokens: int
    selection: Projection | None


class Trainer:
    """One run of one recipe; ``run`` may be called once."""

    def __init__(
        self,
        spec: TrainSpec,
        recipe: Recipe,
        data: Mixture,
        selection: RowSource | None,
        world: World,
        clock: Clock = time.monotonic,
    ) -> None:
        self._spec = spec
        self._recipe = recipe
        self._data = data
        self._selection = selection
        self._world = world
        self._clock = clock
        self._folder = Path(spec.output)
        self._leaves = recipe.parameters
        matrices = recipe.matrices if spec.optimizer == "muon" else frozenset[str]()
        self._optimizer = Optimizer(
            self._leaves, matrices, spec.matrix_lr, spec.adam_lr, spec.weight_decay
        )
        self._average = (
            {name: leaf.detach().clone() for name, leaf in self._leaves.items()} if spec.ema else {}
        )
        self._position = Position(0, 0.0)

    def run(self) -> Outcome:
        """Train to the schedule's end or ``max_minutes``; the state is saved either way."""
        spec = self._spec
        if spec.resume:
            self._position = load_checkpoint(
                self._folder, spec, self._leaves, self._average, self._optimizer
            )
        total, unit = (spec.steps, "steps") if spec.steps else (spec.minutes or 0.0, "min")
        with Progress(
            self._folder if self._world.leads else None,
            spec.algorithm,
            float(total),
            self._amount(self._position),
            unit,
        ) as progress:
            tokens = self._loop(progress)
            self.use_average()
            measured = self.measure()
            if measured is not None:
                progress.say(describe("selection", measured))
                progress.log({"step": self._position.step, "selection": measured._asdict()})
        finished = self._progress(self._position) >= 1.0
        return Outcome(finished, self._position, tokens, measured)

    def measure(self) -> Projection | None:
        """Agreement on the selection; None without any."""
        source = self._selection
        if source is None:
            return None
        counts: AgreementCounts | None = None
        rows = min(len(source), self._spec.selection_rows)
        size = min(rows, self._data.batch_rows)
        for first in range(0, rows - rows % size, size):
            batch = source.take(first, size)
            found = self._recipe.agreement(batch)
            if counts is None:
                counts = AgreementCounts(found.agree.shape[-1])
            counts.add(found.agree, batch.own_from, found.origin)
        return None if counts is None else counts.result()

    def use_average(self) -> None:
        """Go on with the weights' moving average, if one is kept."""
        with torch.no_grad():
            for name, tensor in self._average.items():
                self._leaves[name].copy_(tensor)

    def _loop(self, progress: Progress) -> int:
        spec = self._spec
        # Compilation in the first step is no training time.
        begun = self._clock()
        start: float | None = None
        before = self._position.seconds
        saved = begun
        tokens = 0
        window_tokens, window_begin = 0, begun
        while self._progress(self._position) < 1.0:
            batch = self._data.take(self._position.step, self._world.rank, self._world.size)
            loss, agree, origin = self._step(batch)
            step = self._position.step + 1
            tokens += batch.ids.numel() * self._world.size
            window_tokens += batch.ids.numel() * self._world.size
            if start is None or step % 10 == 0:
                _wait_for(loss)
            now = self._clock()
            start = now if start is None else start
            # The schedule and the end are by one clock, else parameters and steps would differ.
            seconds, spent = self._world.lead((before + now - start, now - begun))
            self._position = Position(step, seconds)
            if step % spec.log_every == 0:
                rate = window_tokens / max(1e-9, self._clock() - window_begin)
                window_tokens, window_begin = 0, self._clock()
                self._report(progress, loss, agree, batch, origin, rate)
            if step % spec.selection_every == 0 and self._selection is not None:
                measured = self.measure()
                assert measured is not None
                progress.say(describe(f"step {step}: selection", measured))
                progress.log({"step": step, "selection": measured._asdict()})
            if now - saved > 60.0 * spec.checkpoint_minutes:
                self._save()
                saved = now
            if spec.max_minutes is not None and spent > 60.0 * spec.max_minutes:
                break
        self._save()
        return tokens

    def _step(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, int]:
        spec = self._spec
        for leaf in self._leaves.values():
            leaf.grad = None
        found = self._recipe.step(batch)
        found.loss.backward()  # type: ignore[no-untyped-call]
        grads = [leaf.grad for leaf in self._leaves.values() if leaf.grad is not None]
        self._world.average(grads)
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        torch._foreach_mul_(grads, (spec.grad_clip / (norm + 1e-6)).clamp(max=1.0))
        progress = self._progress(self._position)
        self._optimizer.step(rate_factor(progress, spec.warmup, spec.decay, spec.schedule))
        if self._average:
            with torch.no_grad():
                torch._foreach_lerp_(
                    list(self._average.values()),
                    [leaf.detach() for leaf in self._leaves.values()],
                    1.0 - spec.ema,
                )
        return found.loss.detach(), found.agree, found.origin

    def _amount(self, position: Position) -> float:
        return position.step if self._spec.steps else position.seconds / 60.0

    def _progress(self, position: Position) -> float:
        """The part of the schedule that is done."""
        return self._amount(position) / (self._spec.steps or self._spec.minutes or 1)

    def _report(
        self,
        progress: Progress,
        loss: torch.Tensor,
        agree: torch.Tensor,
        batch: Batch,
        origin: int,
        rate: float,
    ) -> None:
        counts = AgreementCounts(agree.shape[-1])
        counts.add(agree, batch.own_from, origin)
        found = counts.result()
        value = float(loss)
        shown = {
            "loss": f"{value:.3f}",
            "accept": "/".join(f"{one:.2f}" for one in found.per_step),
            "length": f"{found.projected:.2f}",
            "tok/s": f"{rate:.3g}",
        }
        progress.update(self._amount(self._position), shown)
        record = {"step": self._position.step, "seconds": round(self._position.seconds, 2)}
        progress.log({**record, "loss": value, "tokens_per_s": rate, **found._asdict()})

    def _save(self) -> None:
        if self._world.leads:
            save_checkpoint(
                self._folder,
                self._spec,
                self._position,
                self._leaves,
                self._average,
                self._optimizer,
            )


def describe(what: str, found: Projection) -> str:
    """One line of figures."""
    steps = " ".join(f"{one:.3f}" for one in found.per_step)
    text = f"{what}: accepted {steps}, projected accept length {found.projected:.3f}"
    return text if found.walked is None else f"{text}, over greedy text {found.walked:.3f}"


def _wait_for(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
