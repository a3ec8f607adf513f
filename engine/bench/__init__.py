"""Measurements of single steps; see :mod:`outrider.engine.bench_step`."""
