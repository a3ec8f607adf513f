"""The loop: batches, steps, a schedule by steps or by time, selection, checkpoints."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from ...engine_core.train_spec import TrainSpec
from .accept_length import AgreementCounts, Projection
from .batches import Batch, Mixture, RowSource
from .checkpoint import Position, SavedRun, save_checkpoint
from .interruption import Interruption
from .optimizer import Optimizer, rate_factor
from .progress import Progress
from .recipe import Recipe, StepResult
from .world import World

Clock = Callable[[], float]


class Outcome(NamedTuple):
    """How a command ended: whether the schedule's end was reached, and where it stands.
    ``interrupted``: by a signal; the selection was not looked at then.
    """

    finished: bool
    position: Position
    tokens: int
    selection: Projection | None
    interrupted: bool = False


class Trainer:
    """One run of one recipe; ``run`` may be called once. ``saved``: where it goes on; ``marks``:
    fingerprints of the data, kept with the state.
    """

    def __init__(
        self,
        spec: TrainSpec,
        recipe: Recipe,
        data: Mixture,
        selection: RowSource,
        world: World,
        saved: SavedRun | None = None,
        marks: dict[str, str] | None = None,
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
        self._saved = saved
        self._marks = marks or {}
        self._interrupted = False
        self._position = Position(0, 0.0) if saved is None else saved.position

    def run(self) -> Outcome:
        """Train to the schedule's end, ``max_minutes`` or a signal; the state is saved whichever
        it is.
        """
        spec = self._spec
        if self._saved is not None:
            self._saved.restore(self._leaves, self._average, self._optimizer)
        total, unit = (spec.steps, "steps") if spec.steps else (spec.minutes or 0.0, "min")
        with Progress(
            self._folder if self._world.leads else None,
            spec.algorithm,
            float(total),
            self._position.amount(spec),
            unit,
            fresh=self._saved is None,
        ) as progress:
            with Interruption(self._world.leads) as interruption:
                tokens = self._loop(progress, interruption)
            self.use_average()
            finished = self._position.part(spec) >= 1.0
            measured = None if self._interrupted else self.measure()
            if measured is not None:
                progress.say(describe("selection", measured))
                progress.log({"step": self._position.step, "selection": measured._asdict()})
        return Outcome(finished, self._position, tokens, measured, self._interrupted)

    def measure(self) -> Projection:
        """Agreement on the selection."""
        source = self._selection
        counts: AgreementCounts | None = None
        rows = min(len(source), self._spec.selection_rows)
        size = min(rows, self._data.batch_rows)
        for first in range(0, rows - rows % size, size):
            batch = source.take(first, size)
            found = self._recipe.agreement(batch)
            if counts is None:
                counts = AgreementCounts(found.agree.shape[-1])
            counts.add(found.agree, batch.own, found.origin, found.drafted)
        assert counts is not None
        return counts.result()

    def use_average(self) -> None:
        """Go on with the weights' moving average, if one is kept."""
        with torch.no_grad():
            for name, tensor in self._average.items():
                self._leaves[name].copy_(tensor)

    def _loop(self, progress: Progress, interruption: Interruption) -> int:
        spec = self._spec
        # Compilation in the first step is no training time.
        begun = self._clock()
        start: float | None = None
        before = self._position.seconds
        saved = begun
        tokens = 0
        window_tokens, window_begin = 0, begun
        while self._position.part(spec) < 1.0:
            batch = self._data.take(self._position.step, self._world.rank, self._world.size)
            found = self._step(batch)
            step = self._position.step + 1
            tokens += batch.ids.numel() * self._world.size
            window_tokens += batch.ids.numel() * self._world.size
            if start is None or step % 10 == 0:
                _wait_for(found.loss)
            now = self._clock()
            start = now if start is None else start
            # The schedule and the end are by one clock, else parameters and steps would differ.
            seconds, spent, asked = self._world.lead(
                (before + now - start, now - begun, float(interruption.asked))
            )
            self._position = Position(step, seconds)
            progress.move(self._position.amount(spec))
            if step % spec.log_every == 0:
                rate = window_tokens / max(1e-9, self._clock() - window_begin)
                window_tokens, window_begin = 0, self._clock()
                self._report(progress, found, batch, rate)
            if step % spec.selection_every == 0:
                measured = self.measure()
                progress.say(describe(f"step {step}: selection", measured))
                progress.log({"step": step, "selection": measured._asdict()})
            if now - saved > 60.0 * spec.checkpoint_minutes:
                self._save()
                saved = now
            if spec.max_minutes is not None and spent > 60.0 * spec.max_minutes:
                break
            if asked and self._position.part(spec) < 1.0:
                self._interrupted = True
                break
        self._save()
        return tokens

    def _step(self, batch: Batch) -> StepResult:
        spec = self._spec
        for leaf in self._leaves.values():
            leaf.grad = None
        found = self._recipe.step(batch)
        found.loss.backward()  # type: ignore[no-untyped-call]
        grads = [leaf.grad for leaf in self._leaves.values() if leaf.grad is not None]
        self._world.average(grads)
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        torch._foreach_mul_(grads, (spec.grad_clip / (norm + 1e-6)).clamp(max=1.0))
        progress = self._position.part(spec)
        self._optimizer.step(rate_factor(progress, spec.warmup, spec.decay, spec.schedule))
        if self._average:
            with torch.no_grad():
                torch._foreach_lerp_(
                    list(self._average.values()),
                    [leaf.detach() for leaf in self._leaves.values()],
                    1.0 - spec.ema,
                )
        return found._replace(loss=found.loss.detach())

    def _report(self, progress: Progress, step: StepResult, batch: Batch, rate: float) -> None:
        counts = AgreementCounts(step.agree.shape[-1])
        counts.add(step.agree, batch.own, step.origin, step.drafted)
        found = counts.result()
        value = float(step.loss)
        shown = {
            "loss": f"{value:.3f}",
            "accept": "/".join(f"{one:.2f}" for one in found.per_step),
            "length": f"{found.projected:.2f}",
            "tok/s": f"{rate:.3g}",
        }
        progress.show(shown)
        record = {"step": self._position.step, "seconds": round(self._position.seconds, 2)}
        progress.log({**record, "loss": value, "tokens_per_s": rate, **found._asdict()})

    def _save(self) -> None:
        if self._world.leads:
            save_checkpoint(
                self._folder,
                self._spec,
                self._marks,
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
