"""The interpreter of the kernels' own tests."""

from ...kernels import conftest

assert conftest.interpreter._outrider_tests
