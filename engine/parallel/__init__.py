"""Tensor parallelism: one model over several processes, of which rank 0 decides every token."""
