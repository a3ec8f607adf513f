"""``--draft``: a draft model whose tensors say which algorithm it is for."""

import argparse

from ..engine_core.draft_checks import algorithm_of
from ..engine_core.model_path import resolve_model
from ..engine_core.safetensors_header import HeaderError
from .flags import UsageError

_DRAFT = "speculative_draft_model_path"


def add_draft_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--draft`` beside the flags of the engine."""
    parser.add_argument(
        "--draft",
        dest=_DRAFT,
        default=argparse.SUPPRESS,
        metavar="DRAFT",
        help="as --speculative-draft-model-path; without --speculative-algorithm its tensors say "
        "which it is",
    )


def name_algorithm(namespace: argparse.Namespace) -> None:
    """Let a draft's tensors say what it is, where nothing else does. Raises UsageError."""
    given = vars(namespace)
    named = given.keys() & {"speculative_algorithm", "speculative_config"}
    if named or _DRAFT not in given or namespace.config is not None:
        return
    folder = resolve_model(given[_DRAFT], given.get("speculative_draft_model_revision"), _DRAFT)
    try:
        namespace.speculative_algorithm = algorithm_of(folder)
    except HeaderError as error:
        raise UsageError(f"--draft: {error}; name its --speculative-algorithm") from None
