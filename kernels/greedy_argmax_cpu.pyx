# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, auto_pickle=False, autotestdict=False, embedsignature=False
"""`greedy_argmax` for CPU tensors' arrays: one vectorised pass over the logits."""

from libc.stdint cimport int64_t

cdef extern from "row_argmax.h" nogil:
    int64_t outrider_row_argmax(const float *x, int64_t n)


def greedy_argmax(const float[:, ::1] logits not None, int64_t[::1] ids_out not None):
    """Write each row's id int64 [>= N] of the largest logit of float32 [N, V], -1 if unusable.

    The lowest id wins among equals; a row with a NaN or an infinity is unusable. Raises ValueError
    if ids_out is too short or the vocabulary empty.
    """
    cdef Py_ssize_t row, rows = logits.shape[0]
    if ids_out.shape[0] < rows:
        raise ValueError(f"ids_out has {ids_out.shape[0]} elements for {rows} rows")
    if logits.shape[1] < 1:
        raise ValueError("logits have no columns, a vocabulary has at least one token")
    with nogil:
        for row in range(rows):
            ids_out[row] = outrider_row_argmax(&logits[row, 0], logits.shape[1])
