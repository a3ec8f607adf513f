"""What the native layers of a draft refuse."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.kernels.draft_chains_cpu import CpuChains
from outrider.kernels.draft_cpu import CpuDraft
from outrider.kernels.matrices_cpu import PackedMatrix

HIDDEN, INNER, DIM, VOCAB, SLOTS = 16, 24, 8, 11, 6


def zeros(*shape: int) -> NDArray[np.float32]:
    return np.zeros(shape, dtype=np.float32)


def ones(*shape: int) -> NDArray[np.float32]:
    return np.ones(shape, dtype=np.float32)


def layer(taken: int = HIDDEN) -> dict[str, Any]:
    return {
        "input_norm": ones(HIDDEN),
        "qkv": PackedMatrix(zeros(3 * DIM, taken)),
        "q_norm": None,
        "k_norm": None,
        "o": PackedMatrix(zeros(HIDDEN, DIM)),
        "post_norm": ones(HIDDEN),
        "gate_up": PackedMatrix(zeros(2 * INNER, HIDDEN), pairs=True),
        "down": PackedMatrix(zeros(HIDDEN, INNER)),
        "window": 0,
    }


def draft() -> CpuDraft:
    return CpuDraft(HIDDEN, INNER, 1, 1, DIM, 1, 1e-6)


def run(layers: CpuDraft, **replaced: Any) -> NDArray[np.float32]:
    arrays: dict[str, Any] = {
        "input_ids": np.array([3, 4]),
        "positions": np.array([0, 1]),
        "kv_slots": np.array([2, 3]),
        "cu_q": np.array([0, 2], dtype=np.int32),
        "kv_lens": np.array([2], dtype=np.int32),
        "page_table": np.array([[1]], dtype=np.int32),
        "tree_bits": np.array([1, 3]),
        "is_tree": np.array([0], dtype=np.uint8),
        "kv": zeros(1, 2, SLOTS, 1, DIM),
        "page_size": 2,
        "cos": ones(4, DIM // 2),
        "sin": zeros(4, DIM // 2),
        "hidden": ones(2, HIDDEN),
        "recurrent": zeros(2, HIDDEN),
        "head_input": zeros(2, HIDDEN),
        "asked": np.array([0, 1]),
    }
    arrays.update(replaced)
    layers.forward(**arrays)
    answer: NDArray[np.float32] = arrays["recurrent"]
    return answer


def ready() -> CpuDraft:
    layers = draft()
    layers.set_layer(0, **layer(2 * HIDDEN), embed_norm=ones(HIDDEN))
    layers.set_ends(embed=ones(VOCAB, HIDDEN), fuse=None, final_norm=ones(HIDDEN))
    return layers


def test_without_matrices_the_hidden_state_passes_through() -> None:
    hidden = np.arange(2 * HIDDEN, dtype=np.float32).reshape(2, HIDDEN)
    assert np.array_equal(run(ready(), hidden=hidden), hidden)
    assert np.array_equal(run(ready(), hidden=hidden, recurrent=hidden), hidden)


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"input_ids": np.array([3, VOCAB])}, "input_ids: token 11"),
        ({"positions": np.array([0, 4])}, "positions: 4"),
        ({"kv_slots": np.array([2, SLOTS])}, "kv_slots: 6"),
        ({"hidden": ones(1, HIDDEN)}, "hidden: must be"),
        ({"recurrent": ones(2, HIDDEN - 1)}, "recurrent: must be"),
        ({"head_input": ones(3, HIDDEN)}, "head_input: must be"),
        ({"kv": zeros(2, 2, SLOTS, 1, DIM)}, "kv: must be"),
        ({"cos": ones(4, DIM)}, "cos, sin"),
        ({"asked": np.array([2])}, "asked: there is no token 2"),
    ],
)
def test_wrong_arguments_are_named(replaced: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(ready(), **replaced)


def test_wrong_parts_are_named() -> None:
    layers = draft()
    with pytest.raises(RuntimeError, match="set_ends"):
        run(layers)
    with pytest.raises(ValueError, match="embed: has shape"):
        layers.set_ends(embed=ones(VOCAB, HIDDEN - 1), fuse=None, final_norm=None)
    fuse = PackedMatrix(zeros(HIDDEN, HIDDEN))
    with pytest.raises(ValueError, match="fuse: has shape"):
        layers.set_ends(embed=ones(VOCAB, HIDDEN), fuse=fuse, final_norm=None)
    with pytest.raises(ValueError, match="final_norm"):
        layers.set_ends(embed=ones(VOCAB, HIDDEN), fuse=None, final_norm=ones(3))
    layers.set_ends(embed=ones(VOCAB, HIDDEN), fuse=None, final_norm=None)
    with pytest.raises(RuntimeError, match="set_layer"):
        run(layers, head_input=None)
    with pytest.raises(ValueError, match="qkv: has shape"):
        layers.set_layer(0, **layer(), embed_norm=ones(HIDDEN))
    with pytest.raises(ValueError, match="embed_norm: only the first"):
        layers.set_layer(0, **{**layer(2 * HIDDEN), "input_norm": None}, embed_norm=ones(HIDDEN))
    layers.set_layer(0, **layer())
    with pytest.raises(RuntimeError, match="needs a fuse"):
        run(layers, head_input=None)
    with pytest.raises(ValueError, match="head_input: this draft has no final norm"):
        run(layers)


def chain(chains: CpuChains, **replaced: Any) -> NDArray[np.int32]:
    arrays: dict[str, Any] = {
        "slots": np.array([1], dtype=np.int32),
        "caps": np.array([3], dtype=np.int32),
        "seq_lens": np.array([0, 1], dtype=np.int32),
        "page_table": np.array([[0, 0], [1, 2]], dtype=np.int32),
        "first": np.array([[0], [3]]),
        "hidden": ones(2, HIDDEN),
        "kv": zeros(1, 2, SLOTS, 1, DIM),
        "page_size": 2,
        "cos": ones(4, DIM // 2),
        "sin": zeros(4, DIM // 2),
        "levels": 3,
        "cu_q": np.array([0, 4], dtype=np.int32),
        "tokens": np.zeros(4, dtype=np.int32),
        "parents": np.zeros(4, dtype=np.int32),
        "proposed": np.zeros(1, dtype=np.int32),
        "depths": np.zeros(1, dtype=np.int32),
    }
    arrays.update(replaced)
    chains.draft(**arrays)
    tokens: NDArray[np.int32] = arrays["tokens"]
    return tokens


def follow(chains: CpuChains, **replaced: Any) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    arrays: dict[str, Any] = {
        "slots": np.array([1], dtype=np.int32),
        "kinds": np.array([2], dtype=np.uint8),
        "starts": np.array([1], dtype=np.int32),
        "accept_lens": np.array([2], dtype=np.int32),
        "tokens": np.array([[4, 5]], dtype=np.int32),
        "path": np.array([[0, 2]], dtype=np.int32),
        "input_ids": np.array([3, 9, 4]),
        "kv_slots": np.array([3, 4, 5]),
        "cu_q": np.array([0, 3], dtype=np.int32),
        "kv_lens": np.array([4], dtype=np.int32),
        "page_table": np.array([[1, 2]], dtype=np.int32),
        "prompts": np.zeros((2, 4), dtype=np.int32),
        "features": np.arange(3 * HIDDEN, dtype=np.float32).reshape(3, HIDDEN),
        "kv": zeros(1, 2, SLOTS, 1, DIM),
        "page_size": 2,
        "cos": ones(4, DIM // 2),
        "sin": zeros(4, DIM // 2),
        "first": np.array([[1], [1]]),
        "hidden": ones(2, HIDDEN),
    }
    arrays.update(replaced)
    chains.follow(**arrays)
    return arrays["first"], arrays["hidden"]


def with_head() -> CpuChains:
    head = zeros(5, HIDDEN)
    head[3] = 1
    return CpuChains(ready(), PackedMatrix(head), np.array([9, 8, 7, 6, 5]), False)


def test_a_chain_gives_the_target_s_ids() -> None:
    assert chain(with_head()).tolist() == [0, 3, 6, 6]


def test_a_chain_stops_where_no_row_has_room() -> None:
    assert chain(with_head(), levels=9).tolist() == [0, 3, 6, 6]
    short = {"caps": np.array([1], dtype=np.int32), "seq_lens": np.array([0, 4], dtype=np.int32)}
    assert chain(with_head(), **short).tolist() == [0, 3, 0, 0]


def test_what_was_accepted_gives_the_next_first_token() -> None:
    first, hidden = follow(with_head())
    assert first.tolist() == [[1], [6]]
    # Without matrices, the newest accepted entry's features: those of node 2.
    assert np.array_equal(hidden[1], np.arange(2 * HIDDEN, 3 * HIDDEN, dtype=np.float32))
    assert np.array_equal(hidden[0], ones(HIDDEN))


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"slots": np.array([2], dtype=np.int32)}, "slots: 2"),
        ({"first": np.array([[0], [VOCAB]])}, "first: token 11"),
        ({"caps": np.zeros(2, dtype=np.int32)}, "do not agree on the rows"),
        ({"seq_lens": np.array([0, 3], dtype=np.int32)}, "seq_lens: position 4"),
        ({"page_table": np.array([[0, 0], [1, 3]], dtype=np.int32)}, "page_table: names"),
        ({"hidden": ones(1, HIDDEN)}, "hidden: must be"),
        ({"proposed": np.zeros(0, dtype=np.int32)}, "drafts, proposed, depths"),
        ({"cu_q": np.array([0, 3], dtype=np.int32)}, "caps: beyond the row"),
    ],
)
def test_a_chain_s_wrong_arguments_are_named(replaced: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chain(with_head(), **replaced)


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"slots": np.array([2], dtype=np.int32)}, "slots: 2"),
        ({"accept_lens": np.array([3], dtype=np.int32)}, "accept_lens: beyond the row"),
        ({"tokens": np.array([[4, VOCAB]], dtype=np.int32)}, "input_ids: token 11"),
        ({"kv_slots": np.array([3, SLOTS, 5])}, "kv_slots: 6"),
        ({"kv_lens": np.array([5, 5], dtype=np.int32)}, "kv_slots, kv_lens"),
        ({"page_table": np.array([[1, 3]], dtype=np.int32)}, "page_table: names"),
        ({"features": ones(3, 2 * HIDDEN)}, "features: must be"),
        ({"hidden": ones(1, HIDDEN)}, "hidden: must be"),
        ({"starts": np.array([4], dtype=np.int32)}, "positions: 4"),
    ],
)
def test_wrong_arguments_of_what_was_accepted_are_named(
    replaced: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        follow(with_head(), **replaced)


def test_chains_need_a_fitting_head() -> None:
    with pytest.raises(RuntimeError, match="set_ends and set_layer"):
        CpuChains(draft(), PackedMatrix(zeros(2, HIDDEN)), None, False)
    for ids, message in (([1], "token_ids: has 1"), ([0, VOCAB], "token_ids: 11")):
        with pytest.raises(ValueError, match=message):
            CpuChains(ready(), PackedMatrix(zeros(2, HIDDEN)), np.array(ids), False)
    with pytest.raises(ValueError, match="head: has 12 outputs"):
        CpuChains(ready(), PackedMatrix(zeros(VOCAB + 1, HIDDEN)), None, False)
    head, fc = PackedMatrix(zeros(2, HIDDEN)), PackedMatrix(zeros(HIDDEN, 6))
    with pytest.raises(ValueError, match="only in front of an fc"):
        CpuChains(ready(), head, None, False, input_norm=ones(HIDDEN))
    with pytest.raises(ValueError, match="input_norm: has 5"):
        CpuChains(ready(), head, None, False, fc=fc, input_norm=ones(5))
    with pytest.raises(ValueError, match="chunk_norms: do not make 6"):
        CpuChains(ready(), head, None, False, fc=fc, chunk_norms=ones(2, 4))
