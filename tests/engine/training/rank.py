"""One of two processes of a group on the CPU: ``rank.py RANK STORE TARGET TEXT OUTPUT``."""

import hashlib
import json
import sys
import time

import msgspec
import torch.distributed as dist

from outrider.engine.training.batches import Batch
from outrider.engine.training.eagle3 import Eagle3
from outrider.engine.training.recipe import Recipe, RecipeRegistry, Setting, StepResult
from outrider.engine.training.run import train_draft
from outrider.engine.training.world import World, this_world
from outrider.engine_core.refusal import RefusedError
from outrider.engine_core.train_spec import TrainSpec


class Slow(Eagle3):
    """Rank 1 takes longer for a step: by its own clock it would do fewer of them."""

    def step(self, batch: Batch) -> StepResult:
        """Eagle3's."""
        time.sleep(0.02 * this_world().rank)
        return super().step(batch)


def check_world(world: World) -> None:
    """What rank 0 decides, and what becomes of the others when it fails."""
    assert world.lead([world.rank + 3.0, 0.1]) == [3.0, 0.1]
    order = world.lead_first(lambda: "first", lambda: "then")
    assert order == ("first" if world.leads else "then")

    def fail() -> None:
        raise OSError("no room")

    said = ""
    try:
        world.lead_first(fail, fail)
    except (OSError, RuntimeError) as error:
        said = str(error)
    assert said == ("no room" if world.leads else "rank 0 failed, its own error says why")


def main() -> None:
    """Print a line of what this rank has at the end."""
    rank, store, target, text, output = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    check_world(this_world())
    made: list[Recipe] = []

    def make(setting: Setting) -> Recipe:
        made.append(Slow(setting))
        return made[-1]

    recipes = RecipeRegistry()
    recipes.add("EAGLE3", make, Slow.check)
    spec = TrainSpec(
        algorithm="EAGLE3", model=target, data=(text,), output=output, device="cpu",
        sequence_length=32, on_policy_rows=32, on_policy_tokens=16, on_policy_source="dense",
        selection_rows=16, batch_size=4, unroll=3, minutes=0.02, log_every=1, ema=0.5,
    )  # fmt: skip
    report = train_draft(spec, recipes=recipes)
    bits = hashlib.sha256()
    for name, tensor in sorted(made[0].parameters.items()):
        bits.update(name.encode() + tensor.detach().numpy().tobytes())
    other = msgspec.structs.replace(spec, on_policy_tokens=8, on_policy_cache=output)
    failed = ""
    try:
        train_draft(other, recipes=recipes)
    except (RefusedError, RuntimeError) as error:
        failed = type(error).__name__
    found = {
        "position": report.outcome.position,
        "tokens": report.outcome.tokens,
        "parameters": bits.hexdigest(),
        "failed": failed,
    }
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
