"""Block drafts learn on a GPU as on a CPU: the attention that skips, compiled steps."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from outrider.engine.training.batches import Batch
from outrider.engine.training.block_attention import DENSE, attention_for, disagreement
from outrider.engine.training.dense import DenseTarget
from outrider.engine.training.recipe import Setting
from outrider.engine.training.registry import default_recipes
from outrider.engine.weights import Checkpoint
from outrider.engine_core.model_config import load_model_config
from outrider.engine_core.model_path import resolve_model
from outrider.engine_core.train_spec import TrainSpec

CUDA = torch.device("cuda")
# Of torch's compiler itself: it loads a scripted class, asks any tensor for a gradient, makes (in
# 2.13) an autograd function, and says what could be faster. As errors they end a compilation.
pytestmark = [
    pytest.mark.filterwarnings(
        r"ignore:`torch\.jit\.script_method` is deprecated:DeprecationWarning:torch\.jit"
    ),
    pytest.mark.filterwarnings(
        r"ignore:The \.grad attribute of a Tensor that is not a leaf Tensor:UserWarning:torch\."
    ),
    pytest.mark.filterwarnings(
        r"ignore:.*autograd\.function\.Function'> should not be inst:DeprecationWarning:torch\."
    ),
    pytest.mark.filterwarnings(r"ignore::UserWarning:torch\._inductor\."),
]


@pytest.mark.gpu
def test_the_attention_that_skips_agrees() -> None:
    for size in (64, 128):
        attention = attention_for(CUDA, size)
        assert attention is not DENSE
        assert disagreement(attention, CUDA, torch.bfloat16, size) < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ["DFLASH", "DSPARK"])
def test_a_step_is_the_cpus(algorithm: str) -> None:
    """Loss and gradients, within bfloat16's rounding."""
    folder = resolve_model("pycoder")
    ids = torch.from_numpy(np.random.default_rng(0).integers(8, 8192, (4, 256)))
    batch = Batch(ids, torch.zeros_like(ids, dtype=torch.bool))
    # Anchors of their own, else, for tokens whose probabilities are rounded.
    spec = TrainSpec(
        algorithm=algorithm, model="pycoder", data=("d",), output="o", steps=1, start_focus=0.0
    )
    cpu = step(spec, folder, batch, torch.device("cpu"))
    gpu = step(spec, folder, batch, CUDA)
    assert float(gpu[0]) == pytest.approx(float(cpu[0]), rel=0.03)
    for name, mine in gpu[1].items():
        plain = cpu[1][name]
        angle = torch.nn.functional.cosine_similarity(mine.flatten(), plain.flatten(), dim=0)
        assert float(angle) > 0.9, name


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 40])
def test_text_by_a_graph_is_what_whole_passes_choose(length: int) -> None:
    folder = resolve_model("pycoder")
    config = load_model_config(folder)
    dense = DenseTarget(Checkpoint(folder), config, torch.float32, CUDA)
    ids = torch.from_numpy(np.random.default_rng(1).integers(8, 8192, (3, length))).to(CUDA)
    text = dense.generate(ids, 24)
    whole = dense.forward(torch.cat([ids, text], dim=1)).hidden @ dense.lm_head.t()
    assert torch.equal(whole[:, length - 1 : -1].argmax(-1), text)


def step(
    spec: TrainSpec, folder: Path, batch: Batch, device: torch.device
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Its loss and gradients."""
    config, cuda = load_model_config(folder), device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    target = DenseTarget(Checkpoint(folder), config, dtype, device, cuda)
    moved = Batch(*(part.to(device) for part in batch))
    counts = np.ones(config.vocab_size, dtype=np.int64)
    setting = Setting(msgspec.structs.replace(spec, anchors=16), target, counts, moved.ids, cuda)
    recipe = default_recipes().make(setting)
    generator = torch.Generator().manual_seed(0)
    for leaf in recipe.parameters.values():
        if leaf.ndim == 2:
            noise = torch.randn(leaf.shape, generator=generator) * 0.3 * leaf.shape[1] ** -0.5
            leaf.data += noise.to(device)
    torch.manual_seed(1)
    found = recipe.step(moved)
    found.loss.backward()  # type: ignore[no-untyped-call]
    return found.loss.detach().cpu(), {
        name: leaf.grad.cpu() for name, leaf in recipe.parameters.items() if leaf.grad is not None
    }
