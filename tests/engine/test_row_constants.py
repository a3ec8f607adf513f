"""Constants of equal rows: their values, and that what was handed out stays."""

import torch

from outrider.engine.speculative.row_constants import RowConstants


def test_values_and_what_was_handed_out() -> None:
    made = RowConstants(torch.device("cpu"))
    kept = []
    for rows, width in ((1, 1), (3, 16), (1000, 1), (1025, 1), (700, 16), (5, 3), (0, 4)):
        one = made.of(rows, width)
        kept.append((rows, width, one, [part.data_ptr() for part in one]))
    for rows, width, one, places in kept:
        tokens = rows * width
        assert one.cu_q.tolist() == list(range(0, tokens + 1, width))
        assert one.numbers.tolist() == list(range(tokens))
        assert one.zeros.tolist() == [0] * tokens
        assert one.plain.tolist() == [0] * rows
        assert [part.data_ptr() for part in one] == places
        assert (one.cu_q.dtype, one.plain.dtype) == (torch.int32, torch.uint8)


def test_memory_is_shared_by_all_sizes() -> None:
    made = RowConstants(torch.device("cpu"))
    for rows in range(1, 257):
        made.of(rows, 64)
    allocated = {part.untyped_storage().data_ptr() for part in made.of(256, 64)}
    assert {part.untyped_storage().data_ptr() for part in made.of(255, 64)} == allocated
    assert sum(part.nbytes for part in made._outgrown) < 2**19
