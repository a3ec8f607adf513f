"""From a DrafterSpec to the host drafter that its ``implementation`` makes."""

from importlib import import_module

from .config import EngineConfig
from .drafter_spec import DrafterSpec
from .host_drafter import HostDrafter
from .refusal import Refused, RefusedError


def make_host_drafter(spec: DrafterSpec, config: EngineConfig) -> HostDrafter | Refused:
    """Import ``module:attribute`` and call it with ``(config, spec)``.

    A plug-in that is broken, or that refuses the configuration by raising, is refused by name.
    """
    module, separator, attribute = spec.implementation.partition(":")
    if not separator:
        return _refuse(spec, "must be module:attribute")
    try:
        make: object = getattr(import_module(module), attribute)
    except Exception as error:  # a plug-in's import may raise anything
        return _refuse(spec, f"cannot be imported: {type(error).__name__}: {error}")
    if not callable(make):
        return _refuse(spec, "is not a function of (config, spec)")
    try:
        drafter: object = make(config, spec)
    except RefusedError as error:
        return error.refused
    except Exception as error:
        return _refuse(spec, f"failed: {type(error).__name__}: {error}")
    if not isinstance(drafter, HostDrafter):
        return _refuse(spec, f"made {type(drafter).__name__}, which is no HostDrafter")
    return drafter


def _refuse(spec: DrafterSpec, reason: str) -> Refused:
    return Refused("speculative_algorithm", f"{spec.name}: {spec.implementation} {reason}")
