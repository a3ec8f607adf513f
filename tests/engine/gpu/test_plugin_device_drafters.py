"""Drafters on the device from another package, on the GPU's kernels; on a GPU in CUDA graphs."""

from typing import Any

import pytest
import torch

from outrider.engine.forward_batch import ForwardBatch
from outrider.engine.kv_pool import KVPool
from outrider.engine.speculative.checked_drafter import CheckedDrafter
from outrider.engine_core.sampling_params import SamplingParams

from ...plugins.test_device_plugins import PACKAGE
from ..cores import drive, request, tokens_of
from ..tiny import bigram_config
from .device_cores import KvModel, device_core
from .gpu_driver import DEVICE

VOCAB = 7  # the model's texts repeat after about 20 tokens


class OpenModel(KvModel):
    """Its hidden states may be captured: ``features`` are what the logits are made from."""

    def forward_capture(
        self, batch: ForwardBatch, kv: KVPool, capture_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert capture_layers == ()
        hidden = self.forward(batch, kv)
        return hidden, hidden[:, :0]


def run(algorithm: str | None, page_size: int) -> tuple[dict[str, list[int]], int]:
    """Tokens, and how many drafts were right."""
    params = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
    messages = [request(f"r{i}", [(3 * j + i) % VOCAB for j in range(3 + 4 * i)], params)
                for i in range(3)]  # fmt: skip
    flags: dict[str, Any] = {"disable_cuda_graph": True}
    if algorithm is not None:
        flags["speculative_algorithm"] = algorithm
    made = device_core(OpenModel(VOCAB), bigram_config(VOCAB), page_size=page_size, **flags)
    with made as (assembly, worker):
        outputs = drive(assembly.core, messages)
        drafter = worker._step.drafter
        assert (drafter is None) == (algorithm is None)
        if drafter is not None:
            assert isinstance(drafter, CheckedDrafter)
        if algorithm == "LENS":
            check_features(drafter)
        right = assembly.core.scheduler.counters.spec_accepted_tokens
    return {rid: tokens_of(some) for rid, some in outputs.items()}, right


def check_features(checked: object) -> None:
    """What the head reads in a slot's feature is the token that it decided."""
    assert isinstance(checked, CheckedDrafter)
    lens = checked._drafter
    siblings, newest = lens.siblings[:-1], lens.newest[:-1]  # type: ignore[attr-defined]
    used = newest > 0
    assert bool(used.any())
    assert torch.equal(siblings[used, 0], newest[used])


@pytest.mark.parametrize("algorithm", ["FOLLOW", "LENS"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_output_is_that_of_plain_decoding(
    algorithm: str, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PACKAGE))
    plain, _ = run(None, page_size)
    drafted, right = run(algorithm, page_size)
    assert drafted == plain
    assert right > 0


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ["FOLLOW", "LENS"])
def test_a_plug_in_is_captured_in_graphs(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the embedded model: every decode step with drafts replays a graph."""
    from outrider.engine.build import build_engine
    from outrider.engine_core.config import EngineConfig

    assert DEVICE.type == "cuda"
    monkeypatch.syspath_prepend(str(PACKAGE))
    texts: list[list[list[int]]] = []
    for name in (None, algorithm):
        config = EngineConfig(
            model="pycoder",
            device="cuda",
            dtype="float32",
            max_running_requests=4,
            max_total_tokens=4096,
            speculative_algorithm=name,
            speculative_length_policy="auto" if name is None else "fixed",
        )
        engine = build_engine(config)
        try:
            params = SamplingParams(temperature=0.0, max_new_tokens=40)
            messages = [request(f"r{i}", range(50 + i, 80), params) for i in range(3)]
            outputs = drive(engine.core, messages)
            texts.append([tokens_of(outputs[message.rid]) for message in messages])
            if name is not None:
                counts = engine.worker.counts  # type: ignore[attr-defined]
                assert counts.replays == counts.decode_steps > 0
        finally:
            engine.shutdown()
    assert texts[0] == texts[1]
