"""A gateway over a fake core, in a thread of its own loop: what the SDK tests talk to."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from outrider.engine_core.model_path import resolve_model
from outrider.frontend.core_client import CoreClient, connect_core
from outrider.frontend.gateway import Gateway
from outrider.frontend.loop_thread import LoopThread
from outrider.frontend.server_config import ServerConfig
from outrider.frontend.service import AsyncService
from outrider.frontend.tokenizer import Tokenizer

from .fake_core_process import FakeCore


class SdkServer:
    """Core, service and gateway; ``endpoint`` is where clients connect."""

    def __init__(
        self, folder: Path, config: ServerConfig, silence_s: float, step_ms: float
    ) -> None:
        self.core = FakeCore(f"ipc://{folder}/core", "secret", per_step=2, step_ms=step_ms)
        self._thread = threading.Thread(target=self.core.serve, daemon=True)
        self._thread.start()
        self._loop = LoopThread("sdk-server")
        self.client: CoreClient
        self.gateway: Gateway
        self._loop.run(self._open(folder, config, silence_s))
        self.endpoint = self.gateway.endpoint

    async def _open(self, folder: Path, config: ServerConfig, silence_s: float) -> None:
        self.client, info = await connect_core(f"ipc://{folder}/core", "secret", timeout_s=5)
        service = AsyncService(self.client, Tokenizer(resolve_model("pycoder")), info)

        async def server_info() -> dict[str, object]:
            return {"version": "test", "open": service.open_requests}

        self.gateway = Gateway(service, config, server_info, silence_s)

    def drain(self) -> None:
        async def drain() -> None:
            self.gateway.drain()

        self._loop.run(drain())

    def close_gateway(self) -> None:
        self._loop.run(self.gateway.close())

    def close(self) -> None:
        self._loop.run(self.gateway.close())
        self._loop.run(self.client.close())
        self._loop.close()
        self.core.stopping.set()
        self._thread.join(5)


@contextlib.contextmanager
def sdk_server(
    folder: Path,
    config: ServerConfig | None = None,
    silence_s: float = 5.0,
    step_ms: float = 1.0,
) -> Iterator[SdkServer]:
    """Run a server for the length of a ``with`` block."""
    server = SdkServer(folder, config or ServerConfig(), silence_s, step_ms)
    try:
        yield server
    finally:
        server.close()
