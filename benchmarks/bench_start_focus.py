"""Tokens that a block draft's rounds have accepted, by what token they begin behind.

Rows of held-out text with the target's own greedy text in them are drafted behind every token. The
mean accepted is that of tokens picked at random, of tokens picked in part by the target's surprise
(``outrider train --start-focus``), and of the rounds that serving would come to, one behind the
other. Training that weighs the first like the last learns what serving meets.

    python benchmarks/bench_start_focus.py --selection work/corpus/selection.npy --json focus.json
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from outrider.engine.training.accept_length import own_texts
from outrider.engine.training.batches import Batch
from outrider.engine.training.block_recipe import BlockRecipe
from outrider.engine.training.initial_draft import start_from
from outrider.engine.training.losses import start_weights, surprise
from outrider.engine.training.on_policy import own_rows
from outrider.engine.training.recipe import Setting
from outrider.engine.training.registry import default_recipes
from outrider.engine.training.run import find_target, load_target
from outrider.engine_core.train_spec import TrainSpec, unroll_of

FOCUS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
PROMPTS = (48, 64, 80, 96, 128, 160, 192, 224, 320)


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draft", type=Path, help="its folder (default: the embedded DFLASH)")
    parser.add_argument("--selection", type=Path, required=True, help="token ids, .npy")
    parser.add_argument("--rows", type=int, default=18)
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    folder = args.draft or Path(__file__).parent.parent / "models" / "pycoder-11m-dflash"
    config = json.loads((folder / "config.json").read_text())
    with tempfile.TemporaryDirectory() as place:
        spec = TrainSpec(
            algorithm="DFLASH",
            model="pycoder",
            data=(str(args.selection),),
            output=place,
            device="cpu",
            steps=1,
            sequence_length=args.length,
            on_policy_rows=args.rows,
            on_policy_tokens=128,
            on_policy_prompts=PROMPTS,
            on_policy_source="dense",
            num_hidden_layers=config["num_hidden_layers"],
            intermediate_size=config["intermediate_size"],
            feature_layers=tuple(n + 1 for n in config["dflash_config"]["target_layer_ids"]),
            block_size=config["block_size"],
        )
        target = load_target(*find_target(spec), torch.device("cpu"), False)
        stream = np.load(args.selection).astype(np.int32)
        rows = own_rows(spec, "rows", stream, args.rows, target, None, print)
    counts = np.ones(target.config.vocab_size, dtype=np.int64)
    sample = torch.from_numpy(rows.ids[:4]).long()
    recipe = default_recipes().make(Setting(spec, target, counts, sample, False))
    assert isinstance(recipe, BlockRecipe)
    start_from(folder, recipe)
    drafts = unroll_of(spec)
    accepted: list[torch.Tensor] = []
    unlikely: list[torch.Tensor] = []
    walked: list[int] = []
    for ids, own in zip(rows.ids, rows.own, strict=True):
        batch = Batch(torch.from_numpy(ids)[None].long(), torch.from_numpy(own)[None])
        kept = 1 + recipe.propose(batch).agree[0].long().cumprod(1).sum(1)
        left = surprise(recipe.features(batch.ids)[0], target.lm_head, batch.ids)[0]
        for begin, end in own_texts(batch.own[0]):
            # Behind the text's own tokens, as long as all that is drafted is the text's, too.
            places = slice(begin + 1, end - drafts)
            accepted.append(kept[places])
            unlikely.append(left[places])
            at = begin + 1
            while at < end - drafts:
                walked.append(int(kept[at]))
                at += walked[-1]
    tokens, seen = torch.cat(accepted).float(), torch.cat(unlikely)[None]
    by_focus = {}
    for focus in FOCUS:
        weight = start_weights(seen, torch.ones_like(seen, dtype=torch.bool), focus)[0]
        by_focus[str(focus)] = round(float((tokens * weight).sum() / weight.sum()), 3)
    report = {
        "command": "python benchmarks/bench_start_focus.py " + " ".join(sys.argv[1:]),
        "places": len(tokens),
        "accept_length_by_focus": by_focus,
        "rounds": len(walked),
        "accept_length_of_rounds": round(sum(walked) / len(walked), 3),
    }
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
