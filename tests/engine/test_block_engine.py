"""Whole engines with a block draft of every exporter, from a folder to tokens."""

from pathlib import Path

import msgspec
import pytest

from outrider.engine.rank_worker import find_site, load_rank
from outrider.engine_core.config import EngineConfig
from outrider.engine_core.draft_sizes import draft_sizes
from outrider.engine_core.sampling_params import SamplingParams

from .block_checkpoints import BLOCKS, write_block
from .cores import drive, request, running_engine, tiny_config, tokens_of
from .tiny import write_checkpoint

VOCAB = 48
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9], [20, 21, 22, 20, 21, 22, 20], [5] * 20]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), VOCAB, layers=4)


def decode(config: EngineConfig) -> tuple[list[list[int]], int, int]:
    """Tokens of all prompts, twice (the second time from the prefix cache), and what was drafted
    and accepted."""
    with running_engine(config) as engine:
        tokens: list[list[int]] = []
        drafted = accepted = 0
        for wave in "ab":
            messages = [request(f"{wave}{i}", p, GREEDY) for i, p in enumerate(PROMPTS)]
            for outputs in drive(engine.core, messages).values():
                tokens.append(tokens_of(outputs))
                stats = outputs[-1].stats
                assert stats is not None
                drafted += stats.proposed_drafts
                accepted += stats.correct_drafts
    return tokens, drafted, accepted


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[int]]:
    return decode(tiny_config(target, device="cpu"))[0]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", BLOCKS)
def test_tokens_are_those_of_plain_decoding(
    tmp_path: Path, target: Path, plain: list[list[int]], name: str, overlap: bool
) -> None:
    kind = BLOCKS[name]
    config = tiny_config(
        target,
        kind.algorithm,
        device="cpu",
        speculative_draft_model_path=str(kind.write(tmp_path, target)),
        disable_overlap_schedule=not overlap,
    )
    tokens, drafted, accepted = decode(config)
    assert tokens == plain
    assert drafted > 100
    assert accepted < drafted


@pytest.mark.parametrize("mode", ["static", "cap-accept", "compact"])
def test_a_draft_without_a_confidence_head_drafts_in_every_mode(
    tmp_path: Path, target: Path, plain: list[list[int]], mode: str
) -> None:
    config = tiny_config(
        target,
        "DSPARK",
        device="cpu",
        speculative_draft_model_path=str(BLOCKS["dspark-no-confidence"].write(tmp_path, target)),
        speculative_ragged_verify_mode=mode,
    )
    with running_engine(config) as engine:
        assert engine.core.scheduler.verify is None  # nothing plans lengths by confidence
    tokens, drafted, _ = decode(config)
    assert tokens == plain
    assert drafted > 100


def test_starting_says_once_that_contexts_outgrow_training(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {"steps": 3, "topk": 1, "num_draft_tokens": 4, "trained_length": 48}
    folder = write_block(tmp_path, target, outrider=said)
    config = tiny_config(target, "DFLASH", device="cpu", speculative_draft_model_path=str(folder))
    begin = "outrider: warning: speculative_draft_window_size: "
    with running_engine(config):
        lines = capsys.readouterr().err.splitlines()
    [line] = [line for line in lines if line.startswith(begin)]
    assert "set --speculative-draft-window-size 48, or train it at a longer" in line
    with running_engine(msgspec.structs.replace(config, speculative_draft_window_size=48)):
        assert begin not in capsys.readouterr().err


@pytest.mark.parametrize("name", BLOCKS)
def test_weights_in_memory_are_those_planned(tmp_path: Path, target: Path, name: str) -> None:
    kind = BLOCKS[name]
    folder = kind.write(tmp_path, target)
    config = tiny_config(
        target, kind.algorithm, device="cpu", speculative_draft_model_path=str(folder)
    )
    site = find_site(config)
    loaded = load_rank(site)
    assert loaded.draft is not None
    assert site.draft is not None
    sizes = draft_sizes(site.draft, site.placement)
    assert loaded.draft.weight_bytes == sizes.weight_bytes
    assert site.plan.draft_weight_bytes == sizes.weight_bytes
