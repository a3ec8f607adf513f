"""What flags mean on a CPU and on CUDA, and what each refuses."""

import pytest

from outrider.engine_core.config import EngineConfig, refuse_config, resolve_config
from outrider.engine_core.device_config import Placement, place
from outrider.engine_core.refusal import Refused
from outrider.engine_core.worker import WorkerInfo


def config(**fields: object) -> EngineConfig:
    return EngineConfig(model="m", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "has_cuda", "expected"),
    [
        ({}, False, Placement("cpu", "float32", 0.5)),
        ({}, True, Placement("cuda", "bfloat16", 0.9)),
        ({"device": "cpu"}, True, Placement("cpu", "float32", 0.5)),
        ({"device": "cuda", "dtype": "float32"}, True, Placement("cuda", "float32", 0.9)),
        ({"dtype": "float16", "mem_fraction_static": 0.3}, True, Placement("cuda", "float16", 0.3)),
        ({"dtype": "float32"}, False, Placement("cpu", "float32", 0.5)),
        ({"disable_cuda_graph": True}, True, Placement("cuda", "bfloat16", 0.9)),
        (
            {"simulate_accept_length": 2.0, "speculative_algorithm": "NGRAM"},
            True,
            Placement("cuda", "bfloat16", 0.9),
        ),
    ],
)
def test_placement(fields: dict[str, object], has_cuda: bool, expected: Placement) -> None:
    assert place(config(**fields), has_cuda, "bfloat16") == expected


NGRAM = {"speculative_algorithm": "NGRAM"}
DSPARK = {"speculative_algorithm": "DSPARK"}
TREE = {
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 8,
    "speculative_num_draft_tokens": 16,
}


@pytest.mark.parametrize("source", ["cpu", "gpu", "both"])
def test_a_cuda_device_takes_every_ngram_source(source: str) -> None:
    given = config(speculative_ngram_source=source, **NGRAM)
    assert isinstance(place(given, True, "bfloat16"), Placement)
    info = WorkerInfo(
        vocab_size=9, context_length=64, num_pages=9, page_size=16, max_slots=2, eos_ids=(0,),
        weight_bytes=1, kv_bytes_per_token=8, num_threads=1, device="cuda", dtype="bfloat16",
    )  # fmt: skip
    resolved = resolve_config(given, info)
    assert not isinstance(resolved, Refused)
    assert resolved.drafter is not None
    assert resolved.drafter.name == "NGRAM"
    assert resolved.drafter.host == (source != "gpu")
    assert bool(resolved.drafter.on_device) == (source != "cpu")


@pytest.mark.parametrize(
    ("fields", "has_cuda", "field", "words"),
    [
        ({"device": "cuda"}, False, "device", "no CUDA device"),
        ({"dtype": "bfloat16"}, False, "dtype", "a CPU computes in float32"),
        ({"dtype": "float16", "device": "cpu"}, True, "dtype", "a CPU computes in float32"),
        ({"cuda_graph_max_bs": 4}, False, "cuda_graph_max_bs", "no CUDA graphs"),
        ({"disable_cuda_graph": True}, False, "disable_cuda_graph", "no CUDA graphs"),
        ({"speculative_ngram_source": "gpu", **NGRAM}, False, "ngram_source", "needs a CUDA"),
        ({"speculative_ngram_source": "both", **NGRAM}, False, "ngram_source", "needs a CUDA"),
        (TREE | {"speculative_eagle_topk": 9}, True, "eagle_topk", "a GPU ranks 8 at most"),
    ],
)
def test_what_a_device_refuses(
    fields: dict[str, object], has_cuda: bool, field: str, words: str
) -> None:
    refused = place(config(**fields), has_cuda, "bfloat16")
    assert isinstance(refused, Refused)
    assert refused.field.endswith(field)
    assert words in refused.reason
    if not has_cuda:  # a named device is known before anything is loaded
        early = refuse_config(config(**{**fields, "device": "cpu"}))
        assert early == (None if field == "device" else refused)


def test_a_cpu_drafts_wider_trees_than_a_gpu() -> None:
    assert isinstance(place(config(**TREE), True, "bfloat16"), Placement)
    wide = config(**TREE | {"speculative_eagle_topk": 9})
    assert isinstance(place(wide, False, "bfloat16"), Placement)


def test_an_unknown_checkpoint_type_needs_a_dtype() -> None:
    refused = place(config(), True, "float64")
    assert isinstance(refused, Refused)
    assert "float64" in refused.reason
    assert isinstance(place(config(dtype="bfloat16"), True, "float64"), Placement)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"simulate_accept_length": 2.0}, "simulate_accept_length"),
        ({"simulate_survival": 0.8}, "simulate_survival"),
        ({"simulate_survival": 0.8, **NGRAM}, "simulate_survival"),
        ({"simulate_survival": 1.0, **DSPARK}, "simulate_survival"),
        ({"simulate_survival": float("nan"), **DSPARK}, "simulate_survival"),
        ({"simulate_survival": 0.8, "simulate_accept_length": 2.0, **DSPARK}, "simulate_survival"),
        (
            {
                "simulate_survival": 0.8,
                "speculative_ragged_verify_mode": "cap-accept",
                **DSPARK,
            },
            "simulate_survival",
        ),
        ({"simulate_accept_length": 0.5, **NGRAM}, "simulate_accept_length"),
        ({"simulate_accept_length": float("nan"), **NGRAM}, "simulate_accept_length"),
        ({"simulate_accept_length": 12.5, **NGRAM}, "simulate_accept_length"),
        ({"speculative_ngram_source": "gpu"}, "speculative_ngram_source"),
        *(
            ({"speculative_ngram_source": "gpu", field: value, **NGRAM}, field)
            for field, value in (
                ("speculative_ngram_max_bfs_breadth", 4),
                ("speculative_ngram_match_type", "PROB"),
                ("speculative_ngram_capacity", 1000),
                ("speculative_ngram_external_sam_budget", 2),
            )
        ),
        ({"cuda_graph_max_bs": 0}, "cuda_graph_max_bs"),
        ({"cuda_graph_max_bs": 4, "disable_cuda_graph": True}, "cuda_graph_max_bs"),
        ({"mem_fraction_static": 1.0}, "mem_fraction_static"),
        ({"skip_tokenizer_init": True, "tokenizer_path": "x"}, "tokenizer_path"),
        (
            {
                "skip_tokenizer_init": True,
                "speculative_ngram_external_corpus_path": "x",
                "speculative_ngram_external_sam_budget": 2,
                **NGRAM,
            },
            "speculative_ngram_external_corpus_path",
        ),
    ],
)
def test_flags_that_contradict_each_other(fields: dict[str, object], field: str) -> None:
    refused = refuse_config(config(**fields))
    assert refused is not None
    assert refused.field == field


def test_a_baseline_does_not_simulate() -> None:
    given = config(simulate_accept_length=3.5, speculative_ngram_source="cpu", **NGRAM)
    assert refuse_config(given) is None
    assert given.without_speculation() == config()
