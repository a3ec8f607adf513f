"""The thresholds by which the flags have drafts accepted."""

from ...engine_core.config import EngineConfig
from ...kernels.threshold_sample import Thresholds


def thresholds_of(config: EngineConfig) -> Thresholds | None:
    """The thresholds, where the flags ask for this rule."""
    if config.accept_rule != "threshold":
        return None
    return Thresholds(
        config.speculative_accept_threshold_single, config.speculative_accept_threshold_acc
    )
