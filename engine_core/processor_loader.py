"""Custom logits processors as the engine's process loads them, and how requests ask for them."""

import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from typing import NamedTuple, Protocol, final

import msgspec

from .config import CoreConfig
from .processor_calls import Calls, refuse_calls, said
from .processor_names import FIELD, Processor, find_processors, unloaded
from .refusal import Refused, RefusedError


class ProcessorContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a processor is made with. ``model``: as on the command line, ``tokenizer_path``: the
    tokenizer's folder where that is another; ``device``: "cpu" or "cuda", where logits are.
    """

    vocab_size: int
    eos_ids: tuple[int, ...]
    context_length: int
    device: str
    model: str
    tokenizer_path: str | None


class ReadsArguments(Protocol):
    """The part of a processor that needs no torch (``engine/logits_processor.py`` has the rest)."""

    def request(self, arguments: Mapping[str, object]) -> object:
        """What it makes of a request's arguments. Raises ValueError for those it does not take."""
        ...


class LoadedProcessor(NamedTuple):
    """A processor under the name that requests use."""

    name: str
    processor: ReadsArguments


@final
class ProcessorSet:
    """The processors of an engine, in the order of its command line: that of their work."""

    def __init__(self, loaded: tuple[LoadedProcessor, ...]) -> None:
        self.loaded = loaded
        self._by_name = {one.name: one.processor for one in loaded}

    def refuse(self, calls: Calls) -> Refused | None:
        """Why a request with these calls is not served, or None."""
        refused = refuse_calls(calls)
        if refused is not None:
            return refused
        for name, arguments in calls.items():
            if name not in self._by_name:
                return unloaded(name, self._by_name)
            made = self.request(name, arguments)
            if isinstance(made, Refused):
                return made
        return None

    def request(self, name: str, arguments: Mapping[str, object]) -> object | Refused:
        """What the processor ``name``, which is loaded, makes of a request's arguments."""
        field = f"{FIELD}.{name}"
        try:
            return self._by_name[name].request(arguments)
        except (ValueError, TypeError, LookupError) as error:
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            return Refused(field, f"{kind}{said(error)}" or "does not take these arguments")
        except (Exception, SystemExit) as error:  # a plug-in may raise anything
            reason = f"the processor failed on its arguments: {type(error).__name__}: {said(error)}"
            return Refused(field, reason, 500)


def processors_of(config: CoreConfig) -> ProcessorSet | None:
    """The engine's processors, made once: the core refuses by those that the worker then runs.

    None where the command line has none. Raises RefusedError naming what cannot be made.
    """
    found = find_processors(config.engine.logits_processors)
    if isinstance(found, Refused):
        raise RefusedError(found)
    if not found:
        return None
    context = ProcessorContext(
        vocab_size=config.worker.vocab_size,
        eos_ids=config.worker.eos_ids,
        context_length=config.context_length,
        device=config.worker.device,
        model=config.engine.model,
        tokenizer_path=config.engine.tokenizer_path,
    )
    return _made(found, context, tuple(sys.path))


def refuse_processor_calls(calls: Calls, processors: ProcessorSet | None) -> Refused | None:
    """Why a request that calls these processors is not served, or None."""
    if not calls:
        return None
    if processors is None:
        return unloaded(next(iter(calls)), ())
    return processors.refuse(calls)


@lru_cache(maxsize=2)
def _made(
    found: tuple[Processor, ...], context: ProcessorContext, _path: tuple[str, ...]
) -> ProcessorSet:
    return ProcessorSet(tuple(LoadedProcessor(one.name, _make(one, context)) for one in found))


def _make(one: Processor, context: ProcessorContext) -> ReadsArguments:
    module, _, path = one.place.partition(":")
    try:
        made: object = import_module(module)
        for attribute in path.split("."):
            made = getattr(made, attribute)
    except (Exception, SystemExit) as error:  # a plug-in's import may raise anything
        remedy = "; install its package or put its folder on PYTHONPATH"
        missing = isinstance(error, ModuleNotFoundError) and error.name == module.split(".")[0]
        reason = f"cannot be imported: {type(error).__name__}: {error}{remedy if missing else ''}"
        raise _broken(one, reason) from error
    if not isinstance(made, type):
        raise _broken(one, "is no class")
    for method in ("request", "apply"):
        if not callable(getattr(made, method, None)):
            raise _broken(one, f"has no method {method!r}; see docs/logits-processors.md")
    try:
        processor: ReadsArguments = made(context)
    except RefusedError:
        raise
    except (Exception, SystemExit) as error:
        raise _broken(one, f"cannot be made: {type(error).__name__}: {error}") from error
    return processor


def _broken(one: Processor, reason: str) -> RefusedError:
    return RefusedError(Refused(FIELD, f"{one.name}: {one.origin} {reason}"))
