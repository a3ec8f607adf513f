"""From a DrafterSpec to the drafter that its ``implementation`` makes."""

from importlib import import_module

from .config import EngineConfig
from .drafter_spec import DrafterSpec
from .host_drafter import HostDrafter
from .refusal import Refused, RefusedError


def make_host_drafter(spec: DrafterSpec, config: EngineConfig) -> HostDrafter | Refused:
    """Import ``module:attribute`` and call it with ``(config, spec)``.

    A plug-in that is broken, or that refuses the configuration by raising, is refused by name.
    """
    drafter = make_drafter_object(spec, spec.implementation, config, spec)
    if isinstance(drafter, Refused | HostDrafter):
        return drafter
    return refuse_maker(
        spec, spec.implementation, f"made {type(drafter).__name__}, which is no HostDrafter"
    )


def make_drafter_object(
    spec: DrafterSpec, implementation: str, *arguments: object
) -> object | Refused:
    """What the function ``implementation``, ``module:attribute``, makes of ``arguments``."""
    module, separator, attribute = implementation.partition(":")
    if not separator:
        return refuse_maker(spec, implementation, "must be module:attribute")
    try:
        make: object = getattr(import_module(module), attribute)
    except Exception as error:  # a plug-in's import may raise anything
        reason = f"cannot be imported: {type(error).__name__}: {error}"
        return refuse_maker(spec, implementation, reason)
    if not callable(make):
        takes = "(config, spec)" if spec.host else "(context)"
        return refuse_maker(spec, implementation, f"is not a function of {takes}")
    try:
        made: object = make(*arguments)
    except RefusedError as error:
        return error.refused
    except Exception as error:
        reason = f"failed: {type(error).__name__}: {error}"
        return refuse_maker(spec, implementation, reason)
    return made


def refuse_maker(spec: DrafterSpec, implementation: str, reason: str) -> Refused:
    """A refusal that names the implementation."""
    return Refused("speculative_algorithm", f"{spec.name}: {implementation} {reason}")
