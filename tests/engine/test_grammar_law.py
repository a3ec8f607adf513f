"""Under a grammar tokens follow the target's law among what is allowed, by every rule."""

from collections import Counter
from functools import lru_cache
from itertools import product
from pathlib import Path

import pytest
import torch

from outrider.engine.step_drafts import StepDrafts
from outrider.engine.training.dense import DenseTarget
from outrider.engine.weights import Checkpoint
from outrider.engine_core.grammar_spec import GrammarSpec
from outrider.engine_core.model_config import load_model_config
from outrider.engine_core.model_path import resolve_model
from outrider.engine_core.sampling_params import SamplingParams

from ..reference import sampling_ref as ref
from ..reference.grammar_ref import allowed, token_bytes
from .cores import drive, request, running_engine, tiny_config, tokens_of

FOLDER = resolve_model("pycoder")
IDS = token_bytes(FOLDER / "tokenizer.json")
BYTES = {index: text for text, ids in IDS.items() for index in ids}
EOS, DRAWS, LEAST, LEAST_P = 0, 3000, 20, 1e-4 / 3
PROMPT = [5, 17, 230, 9]
LETTERS = [bytes(three) for three in product(b"xyz", repeat=3)]
SPEC = GrammarSpec("regex", "[xyz]{3}")
Path_ = tuple[int, ...]


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of requests; other tests check every step."""
    monkeypatch.setenv("OUTRIDER_CHECK", "0")


@lru_cache
def law() -> dict[Path_, float]:
    """Of whole outputs, EOS included, at temperature 1."""
    config = load_model_config(FOLDER)
    target = DenseTarget(Checkpoint(FOLDER), config, torch.float32, torch.device("cpu"), False)
    found: dict[Path_, float] = {}
    open_: dict[Path_, float] = {(): 1.0}
    while open_:
        path, chance = open_.popitem()
        text = b"".join(BYTES[token] for token in path)
        legal = sorted(allowed(LETTERS, text, IDS, EOS))
        hidden = target.forward(torch.tensor([[*PROMPT, *path]])).hidden[0, -1]
        chances = (target.lm_head @ hidden)[legal].softmax(0).tolist()
        for token, share in zip(legal, chances, strict=True):
            into = found if token == EOS else open_
            into[(*path, token)] = chance * share
    return found


def p_value(algorithm: str, **flags: object) -> float:
    flags = {
        "speculative_num_steps": 2,
        "max_running_requests": 256,
        "max_total_tokens": 16384,
        **flags,
    }
    config = tiny_config(Path("pycoder"), algorithm, **flags)
    messages = [
        request(
            str(seed), PROMPT,
            SamplingParams(temperature=1.0, seed=seed, max_new_tokens=6, grammar=SPEC),
        )
        for seed in range(DRAWS)
    ]  # fmt: skip
    with running_engine(config) as engine:
        outputs = drive(engine.core, messages)
        assert engine.core.stats(0).spec_accepted_tokens > 50
    found = Counter(tuple(tokens_of(parts)) for parts in outputs.values())
    assert found.keys() <= law().keys()
    rare = [path for path, chance in law().items() if chance * DRAWS < LEAST]
    rare.append(min(law().keys() - set(rare), key=law().__getitem__))  # one cell, large enough
    wide = [path for path in law() if path not in rare]
    assert len(wide) > 5
    cells = [[path] for path in wide] + [rare]
    counts = [sum(found[path] for path in cell) for cell in cells]
    return ref.chi_square_p(counts, [DRAWS * sum(law()[path] for path in cell) for cell in cells])


@pytest.mark.parametrize(
    ("algorithm", "flags"),
    [
        ("EAGLE3", {"speculative_use_rejection_sampling": True}),
        ("STANDALONE", {"speculative_use_block_verification": True}),
    ],
    ids=["rejection", "block"],
)
def test_outputs_follow_the_targets_law(algorithm: str, flags: dict[str, object]) -> None:
    assert p_value(algorithm, **flags) > LEAST_P


def test_leaving_drawn_drafts_out_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forbidden draft that is cut instead of rejected shifts what comes in its place."""
    monkeypatch.setattr(StepDrafts, "fixed", property(lambda self: False))
    assert p_value("EAGLE3", speculative_use_rejection_sampling=True) < LEAST_P
