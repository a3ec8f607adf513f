"""DFLASH's and DSPARK's networks against the equations, in plain torch."""

import pytest
import torch

from outrider.engine.models import block_masks
from outrider.engine.models.block_heads import draft_by_markov
from outrider.engine.models.block_net import BlockNet
from outrider.engine.models.block_weights import ConfidenceWeights, MarkovWeights
from outrider.engine.models.torch_block import TorchBlock
from outrider.engine_core.draft_config import DraftConfig
from outrider.kernels.confidence_logits import confidence_logits
from outrider.kernels.markov_latent import gated_latent, rnn_latent

from ..reference.block_draft import BlockReference
from .block_nets import (
    CONFIGS,
    CPU,
    Tables,
    block_config,
    check_choice,
    ragged,
    random_tensors,
    reference_of,
    run_blocks,
    weights_of,
)


def made(config: DraftConfig) -> tuple[TorchBlock, BlockReference]:
    tensors, target = random_tensors(config), Tables()
    net = TorchBlock(weights_of(config, tensors), config, target, torch.float32, CPU)
    return net, reference_of(config, tensors, target)


@pytest.mark.parametrize("name", CONFIGS)
def test_blocks_are_those_of_the_equations(name: str) -> None:
    config = CONFIGS[name]
    net, reference = made(config)
    assert isinstance(net, BlockNet)
    passed = run_blocks(net, reference, ragged(config), CPU)
    for hidden, wanted in zip(passed.hidden, passed.wanted, strict=True):
        torch.testing.assert_close(hidden.double(), wanted.double(), atol=1e-4, rtol=1e-4)
    for injected, context in zip(passed.injected, passed.contexts, strict=True):
        for layer, (key, value) in enumerate(zip(context.keys, context.values, strict=True)):
            torch.testing.assert_close(injected[layer, 0].double(), key, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(injected[layer, 1].double(), value, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_drafts_are_those_of_the_equations(name: str) -> None:
    net, reference = made(CONFIGS[name])
    check_choice(net, reference, CPU, 1e-5)


def test_the_token_before_changes_a_markov_heads_drafts() -> None:
    """Else the tests of the heads would show little."""
    for name in ("vanilla", "gated", "rnn"):
        _, reference = made(CONFIGS[name])
        hidden = torch.randn(5, 16, generator=torch.Generator().manual_seed(1)).double() / 2
        assert len({tuple(reference.choose(hidden, bonus)[0]) for bonus in range(20)}) > 3


def test_bytes_are_those_of_the_tensors() -> None:
    config = CONFIGS["gated"]
    assert made(config)[0].weight_bytes == 4 * sum(
        tensor.numel() for tensor in random_tensors(config).values()
    )


@pytest.mark.parametrize("name", ["mixed", "narrow windows"])
def test_masks_grow_with_their_batches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS[name]
    passes = []
    for first in (1, 1024):
        monkeypatch.setattr(block_masks, "_FIRST", first)
        net, reference = made(config)
        alone = run_blocks(net, reference, ragged(config)[:1], CPU)
        passes.append([*alone.hidden, *run_blocks(net, reference, ragged(config), CPU).hidden])
    for one, two in zip(*passes, strict=True):
        assert torch.equal(one, two)


def test_large_blocks_whose_rows_see_each_other_are_refused() -> None:
    made(block_config((0,), (True,), drafts=70))
    with pytest.raises(ValueError, match="block_size: blocks of 65 rows"):
        made(block_config((0,), (False,), drafts=64))


def test_confidence_cannot_read_a_head_that_is_not_there() -> None:
    config = block_config((0,), (False,), confidence=True, confidence_with_markov=True)
    with pytest.raises(ValueError, match="confidence_head_with_markov: there is no Markov head"):
        made(config)[0].confidence(
            torch.zeros(4, 1, 16), torch.zeros(1).long(), torch.zeros(4, 1).long()
        )


def test_the_gated_heads_vector() -> None:
    gate = torch.tensor([[0.3 * 2 + 0.1 * 0.5 + 0.2]])
    assert torch.sigmoid(gate).item() == pytest.approx(0.700567, abs=1e-6)
    assert gated_latent(gate, torch.tensor([[0.5]])).item() == pytest.approx(0.350284, abs=1e-6)


def test_the_rnn_heads_vector() -> None:
    rows = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9]])
    state = torch.zeros(1, 1)
    for e, h, s, out in ((0.5, 2.0, 0.297202, 0.975743), (-1.0, 1.0, 0.258974, 0.298654)):
        joint = torch.cat((state, torch.tensor([[e, h]])), dim=1) @ rows.T
        assert rnn_latent(joint, state).item() == pytest.approx(out, abs=1e-6)
        assert state.item() == pytest.approx(s, abs=1e-6)


def test_the_same_vectors_through_the_heads() -> None:
    """Of two tokens the second is chosen just where the bias is above or below the vector's."""
    hidden, w1 = torch.full((1, 1, 1), 2.0), torch.tensor([[0.5], [0.0]])
    w2 = torch.tensor([[0.0], [1.0]])
    gated = MarkovWeights(w1, w2, torch.tensor([[0.3, 0.1]]), torch.tensor([0.2]))
    joint = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9]])
    rnn = MarkovWeights(w1, w2, joint=joint, joint_bias=torch.zeros(3))
    for head, latent in ((gated, 0.350284), (rnn, 0.975743)):
        for shift, wanted in ((-1e-5, 1), (1e-5, 0)):
            logits, tokens = torch.tensor([[[latent + shift, 0.0]]]), torch.zeros(1, 1).long()
            draft_by_markov(head, hidden, logits, torch.tensor([0]), tokens, None)
            assert tokens.item() == wanted


def test_confidence_is_raw_logits() -> None:
    head = ConfidenceWeights(torch.tensor([1.0, 0.5]), torch.tensor(-1.0))
    hidden = torch.tensor([[[3.0]], [[0.0]]])  # two drafts of one row
    w1 = torch.tensor([[0.0], [2.0]])
    bonus, tokens = torch.tensor([0]), torch.tensor([[1], [0]])
    raw = confidence_logits(head.weight, head.bias, w1, hidden, bonus, tokens)
    assert raw.tolist() == [[2.0, 0.0]]
    assert raw.sigmoid()[0, 0].item() == pytest.approx(0.880797, abs=1e-6)
