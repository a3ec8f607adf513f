"""Runs state machines until the rare paths that a test is about were reached."""

from collections import Counter
from collections.abc import Iterable
from typing import Final

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

LEAST: Final = 100  # times that every rare path is wanted
ROUNDS: Final = 10


def run_until_reached(
    machine: type[RuleBasedStateMachine],
    reached: Counter[str],
    wanted: Iterable[str],
    *,
    examples: int,
    steps: int,
) -> None:
    """Run rounds of `examples` runs of at most `steps` rules, each round with its own seed.

    Stops after two rounds or later, once every name in `wanted` was counted LEAST times. What one
    seed generates depends on the modules that happen to be loaded, so a fixed number of examples
    would reach the paths today and miss them tomorrow.
    """
    missing: dict[str, int] = {}
    for number in range(ROUNDS):
        run_state_machine_as_test(
            seed(number)(machine),
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                database=None,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
            ),
        )
        missing = {name: reached[name] for name in wanted if reached[name] < LEAST}
        if number and not missing:
            return
    raise AssertionError(f"reached too seldom in {ROUNDS} rounds: {missing}")
