from .layers_cpu cimport Layers

cdef class CpuDraft(Layers):
    cdef tuple arrays
