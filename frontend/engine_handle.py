"""A core process together with the service that drives it: started, watched, restarted, ended.

The server, the offline ``LLM`` class, batch runs and benchmarks all run on one of these.
"""

import asyncio
import contextlib
import logging
from array import array
from collections.abc import Callable
from pathlib import Path

from ..engine_core.config import EngineConfig
from ..engine_core.model_path import resolve_model
from ..engine_core.refusal import Refused, RefusedError
from .core_client import CoreClient, connect_core
from .corpus_load import corpus_from_file
from .errors import LaunchError
from .launch import STOP_TIMEOUT_S, CoreProcess, describe_exit, start_core
from .no_tokenizer import NoTokenizer
from .service import AsyncService
from .tokenizer import Tokenizer

log = logging.getLogger("outrider")
CONNECT_TIMEOUT_S = 30.0
MAX_FAILED_STARTS = 3
STARTUP_CORPUS = "startup"  # name of the corpus that a flag loads

StartCore = Callable[[EngineConfig], CoreProcess]


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    """The tokenizer that a configuration names. Raises ModelNotFound, RefusedError."""
    if config.skip_tokenizer_init:
        return NoTokenizer(resolve_model(config.model, config.revision))
    if config.tokenizer_path is None:
        return Tokenizer(resolve_model(config.model, config.revision))
    folder = Path(config.tokenizer_path).expanduser()
    if not folder.is_dir():
        reason = f"{config.tokenizer_path!r} is not a folder; name one with a tokenizer.json"
        raise RefusedError(Refused("tokenizer_path", reason))
    return Tokenizer(folder)


class EngineHandle:
    """A running engine; made by :func:`start_engine`, belongs to one event loop.

    ``died`` is set when the core has ended by itself and no restart follows.
    """

    def __init__(
        self,
        config: EngineConfig,
        core: CoreProcess,
        client: CoreClient,
        service: AsyncService,
        start: StartCore,
        restart: bool,
    ) -> None:
        self.config = config
        self.core = core
        self.service = service
        self.died = asyncio.Event()
        self.restarts = 0
        self._client = client
        self._start = start
        self._restart = restart
        self._loop = asyncio.get_running_loop()
        self._stopping = False
        self._restarting: asyncio.Task[None] | None = None
        self._watch(core)

    async def stop(self, drain_s: float = 0.0) -> None:
        """End the engine; open requests may finish within ``drain_s`` seconds. Idempotent."""
        if self._stopping:
            return
        deadline = self._loop.time() + drain_s
        while self.service.open_requests and self._loop.time() < deadline:
            if self.died.is_set():
                break
            await asyncio.sleep(0.02)
        self._stopping = True
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)
        with contextlib.suppress(RefusedError):  # it is dead already
            await self._client.shutdown()
        await asyncio.to_thread(self.core.stop, STOP_TIMEOUT_S)
        await self._client.close()

    def abandon(self) -> None:
        """End the core from any thread, at once; nothing else is closed."""
        self._stopping = True
        self.core.stop(STOP_TIMEOUT_S)

    def _watch(self, core: CoreProcess) -> None:
        def on_exit(status: int) -> None:
            self._loop.call_soon_threadsafe(self._core_ended, core, status)

        core.on_exit(on_exit)

    def _core_ended(self, core: CoreProcess, status: int) -> None:
        if self._stopping or core is not self.core:
            return
        reason = f"the engine core died ({describe_exit(status)})"
        log.error("%s", reason)
        self._client.fail_all(reason)
        if self._restart:
            self._restarting = self._loop.create_task(self._start_again())
        else:
            self.died.set()

    async def _start_again(self) -> None:
        for attempt in range(1, MAX_FAILED_STARTS + 1):
            old = self._client
            await asyncio.to_thread(self.core.stop, 0.0)
            log.warning("starting a new engine core (attempt %d)", attempt)
            try:
                self.core, self._client = await _start_and_connect(self.config, self._start)
                await _load_corpus(self.config, self._client, self.service.tokenizer)
            except (LaunchError, RefusedError) as error:
                log.error("the new engine core did not start: %s", error)
                continue
            await old.close()
            assert self.core.info is not None
            self.service.replace_core(self._client, self.core.info)
            self.restarts += 1
            self._watch(self.core)
            return
        self.died.set()


async def start_engine(
    config: EngineConfig,
    *,
    restart: bool = False,
    start: StartCore = start_core,
) -> EngineHandle:
    """Start a core process and connect a service to it.

    Raises ModelNotFound, RefusedError or LaunchError. ``restart``: a core that dies is replaced;
    after three failed starts in a row the engine counts as dead.
    """
    tokenizer = await asyncio.to_thread(load_tokenizer, config)
    core, client = await _start_and_connect(config, start)
    try:
        assert core.info is not None
        service = AsyncService(client, tokenizer, core.info)
        await _load_corpus(config, client, tokenizer)
    except BaseException:
        await client.close()
        await asyncio.to_thread(core.stop, 1.0)
        raise
    return EngineHandle(config, core, client, service, start, restart)


async def _start_and_connect(
    config: EngineConfig, start: StartCore
) -> tuple[CoreProcess, CoreClient]:
    starting = asyncio.ensure_future(asyncio.to_thread(start, config))
    try:
        core = await asyncio.shield(starting)
    except asyncio.CancelledError:
        # The thread cannot be interrupted: its core is ended as soon as it is up.
        starting.add_done_callback(_stop_late)
        raise
    try:
        client, info = await connect_core(
            core.endpoint,
            core.token,
            alive=lambda: core.exit_status is None,
            timeout_s=CONNECT_TIMEOUT_S,
        )
        core.info = info
    except BaseException:
        await asyncio.to_thread(core.stop, 1.0)
        raise
    return core, client


async def _load_corpus(config: EngineConfig, client: CoreClient, tokenizer: Tokenizer) -> None:
    """Give the core the external corpus of ``--speculative-ngram-external-corpus-path``."""
    path = config.speculative_ngram_external_corpus_path
    if path is None:
        return
    limit = config.speculative_ngram_external_corpus_max_tokens
    try:
        corpus = await asyncio.to_thread(corpus_from_file, path, tokenizer, limit)
    except RefusedError as error:
        refused = Refused("speculative_ngram_external_corpus_path", error.refused.reason)
        raise RefusedError(refused) from None
    documents = [array("i", document).tobytes() for document in corpus.documents]
    reply = await client.add_corpus(STARTUP_CORPUS, documents)
    if reply.refused is not None:
        raise RefusedError(reply.refused)


def _stop_late(starting: "asyncio.Future[CoreProcess]") -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().stop(0.0)
