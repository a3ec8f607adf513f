"""A server: HTTP and the SDK gateway in this process, the engine core in a child.

HTTP answers from the first moment (503 until the model is loaded), so a port that is taken is
noticed before anything is loaded. SIGTERM drains; a core that dies ends the server with status 1
unless it may be restarted.
"""

import asyncio
import contextlib
import logging
import os
import sys
from pathlib import Path

import msgspec

from .. import __version__
from ..engine_core.config import EngineConfig
from .announcements import Announcement, announce
from .engine_handle import EngineHandle, StartCore, start_engine
from .errors import OutriderError
from .gateway import Gateway
from .http import ServerState, create_app, serve_http
from .launch import start_core
from .metrics import average_accept_length
from .sampling_defaults import load_sampling_defaults
from .server_config import ServerConfig
from .simulated import warn_if_simulated

log = logging.getLogger("outrider")
DEAD_CORE_GRACE_S = 0.5  # lets the errors of the open requests reach their clients


async def serve(
    config: EngineConfig, server: ServerConfig, *, start: StartCore = start_core
) -> int:
    """Serve until SIGTERM, SIGINT or the core's death; returns the exit status.

    Raises OutriderError, RefusedError or ModelNotFound when the server cannot be started.
    """
    state = ServerState(
        config.served_model_name or config.model,
        settings=_settings(config, server),
        api_key=server.api_key,
        corpus_max_tokens=config.speculative_ngram_external_corpus_max_tokens,
        tool_call_parser=server.tool_call_parser,
    )
    stop = asyncio.Event()
    port = 0
    listening = asyncio.Event()

    def started(bound: int) -> None:
        nonlocal port
        port = bound
        listening.set()

    serving = asyncio.create_task(
        serve_http(
            create_app(None, state),
            server.host,
            server.port,
            drain_timeout=server.drain_timeout,
            stop=stop,
            on_started=started,
            log_level="warning" if server.log_level == "info" else server.log_level,
        )
    )
    try:
        bound = asyncio.create_task(listening.wait())
        await asyncio.wait({serving, bound}, return_when=asyncio.FIRST_COMPLETED)
        if not bound.done():
            bound.cancel()
            _raise_bind_error(server, serving)
            return 1
        engine = await _start(config, server, start, stop)
        if engine is None:
            return 0
        try:
            return await _run(engine, server, state, stop, serving, port)
        finally:
            await engine.stop()
    finally:
        stop.set()
        with contextlib.suppress(OSError):
            await serving


def _raise_bind_error(server: ServerConfig, serving: "asyncio.Task[None]") -> None:
    error = serving.exception()
    if isinstance(error, OSError):
        raise OutriderError(f"cannot listen on {server.host}:{server.port}: {error.strerror}")
    if error is not None:
        raise error


async def _start(
    config: EngineConfig, server: ServerConfig, start: StartCore, stop: asyncio.Event
) -> EngineHandle | None:
    """The started engine; None when a signal came first."""
    starting = asyncio.create_task(start_engine(config, restart=server.restart_engine, start=start))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if starting.done():
        return starting.result()
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    return None


async def _run(
    engine: EngineHandle,
    server: ServerConfig,
    state: ServerState,
    stop: asyncio.Event,
    serving: "asyncio.Task[None]",
    port: int,
) -> int:
    state.sampling_defaults = load_sampling_defaults(engine.service.tokenizer.folder)

    async def server_info() -> dict[str, object]:
        stats = await engine.service.core.stats()
        core: dict[str, object] = msgspec.to_builtins(engine.service.info)
        counters: dict[str, object] = msgspec.structs.asdict(stats)
        internal = {"avg_spec_accept_length": average_accept_length(stats), **counters}
        return {**state.settings, **core, "version": __version__, "internal_states": [internal]}

    gateway = Gateway(engine.service, server, server_info)
    announced: Path | None = None
    try:
        announced = announce(
            Announcement(
                endpoint=gateway.endpoint,
                pid=os.getpid(),
                port=port,
                model=state.model_name,
                curve_server_key=gateway.curve_server_key,
            )
        )
        state.service, state.phase = engine.service, "up"
        print(
            f"outrider {__version__} serves {state.model_name} on "
            f"http://{server.host}:{port} and, for SDK clients, {gateway.endpoint}",
            file=sys.stderr,
            flush=True,
        )
        warn_if_simulated(engine.service.info)
        return await _until_stopped(engine, gateway, stop, serving)
    finally:
        if announced is not None:
            announced.unlink(missing_ok=True)
        await gateway.close()


async def _until_stopped(
    engine: EngineHandle, gateway: Gateway, stop: asyncio.Event, serving: "asyncio.Task[None]"
) -> int:
    stopping = asyncio.create_task(stop.wait())
    dying = asyncio.create_task(engine.died.wait())
    try:
        await asyncio.wait({stopping, dying, serving}, return_when=asyncio.FIRST_COMPLETED)
        died = engine.died.is_set()
        if died:
            log.error("the engine core is dead; the server ends")
            await asyncio.sleep(DEAD_CORE_GRACE_S)
        gateway.drain()
        stop.set()
        await serving
        return 1 if died or engine.died.is_set() else 0
    finally:
        stopping.cancel()
        dying.cancel()


def _settings(config: EngineConfig, server: ServerConfig) -> dict[str, object]:
    """The resolved configuration for ``/server_info``, without secrets."""
    shown: dict[str, object] = msgspec.structs.asdict(config) | msgspec.structs.asdict(server)
    for secret in ("api_key", "zmq_token", "zmq_curve_secret_key_file"):
        shown[secret] = None if shown[secret] is None else "***"
    return shown
