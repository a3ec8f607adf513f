from libc.stdint cimport int32_t, int64_t, uint8_t

cpdef void extend_inputs(
    const int32_t[::1] slots, const uint8_t[::1] kinds, const int32_t[::1] starts,
    const int32_t[::1] cu_q, const int32_t[::1] accept_lens, const int32_t[:, :] tokens,
    const int32_t[:, :] path, const int64_t[::1] input_ids, const int32_t[:, :] prompts,
    int64_t[::1] next_ids, int64_t[::1] sources, int64_t[::1] positions, int64_t[::1] select,
) except *
cpdef int64_t drop_junk(
    const uint8_t[::1] kinds, const int32_t[::1] accept_lens, const int32_t[::1] cu_q,
    int64_t[::1] next_ids, int64_t[::1] sources, int64_t[::1] positions, int64_t[::1] kv_slots,
    int32_t[::1] kv_lens, int32_t[::1] begins, int64_t[::1] select,
) except -1
cpdef void write_chains(
    const int64_t[:, ::1] drafts, const int32_t[::1] cu_q, const int32_t[::1] caps,
    int32_t[::1] tokens, int32_t[::1] parents, int32_t[::1] proposed, int32_t[::1] depths,
) except *
