"""The HTTP bodies take exactly the fields that the capability table calls supported."""

from outrider.engine_core.capabilities import capability_table, is_supported
from outrider.engine_core.capability_table import LABELS
from outrider.frontend.http.chat import ChatRequest
from outrider.frontend.http.completions import CompletionRequest
from outrider.frontend.http.native import NativeRequest
from outrider.frontend.http.sampling import NativeSampling

BODIES = (ChatRequest, CompletionRequest, NativeRequest, NativeSampling)


def test_every_field_of_a_body_is_supported() -> None:
    for body in BODIES:
        for name in body.__struct_fields__:
            assert is_supported(name), (body.__name__, name)


def test_every_supported_field_is_taken_by_some_body() -> None:
    taken = {name for body in BODIES for name in body.__struct_fields__}
    for row in capability_table():
        for name in row.fields:
            if is_supported(name) and name not in LABELS:
                assert name in taken, name
