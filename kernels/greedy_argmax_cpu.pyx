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


def greedy_tokens(const float[:, ::1] logits not None, const int64_t[::1] token_ids,
                  int64_t[:, :] out not None):
    """Write the token [N, 1] of each row's largest logit, 0's where the row is unusable.

    ``token_ids`` [V]: the token of each column, None where they are the same. Raises ValueError if
    the shapes do not agree.
    """
    cdef Py_ssize_t row
    cdef int64_t best
    if out.shape[0] != logits.shape[0] or out.shape[1] != 1 or logits.shape[1] < 1:
        raise ValueError(f"out: is {tuple(out.shape)[:2]} for {logits.shape[0]} rows")
    if token_ids is not None and token_ids.shape[0] != logits.shape[1]:
        raise ValueError(f"token_ids: has {token_ids.shape[0]} of {logits.shape[1]} columns")
    for row in range(logits.shape[0]):
        best = max(0, outrider_row_argmax(&logits[row, 0], logits.shape[1]))
        out[row, 0] = best if token_ids is None else token_ids[best]
