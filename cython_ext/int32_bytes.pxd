"""Plans and results hold arrays of int32 as bytes."""
from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport int32_t


cdef inline const int32_t *int32_data(bytes data) noexcept:
    return <const int32_t*>PyBytes_AS_STRING(data)
