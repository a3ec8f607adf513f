"""A real core process and an SDK gateway over it, spoken to in raw ZeroMQ frames."""

import contextlib
import threading
from collections.abc import Iterator, Sequence

import msgspec
import zmq

from outrider.engine_core.config import EngineConfig
from outrider.engine_core.messages import FromCore, decode_from_core
from outrider.engine_core.model_path import resolve_model
from outrider.frontend.client_messages import FromGateway, decode_from_gateway
from outrider.frontend.core_client import CoreClient, connect_core
from outrider.frontend.gateway import Gateway
from outrider.frontend.launch import CoreProcess, start_core
from outrider.frontend.loop_thread import LoopThread
from outrider.frontend.server_config import ServerConfig
from outrider.frontend.service import AsyncService
from outrider.frontend.tokenizer import Tokenizer

SDK_TOKEN = "sdk-token"
ANSWER_MS = 20_000
pack = msgspec.msgpack.encode


class RawPeer:
    """A DEALER that sends what it is told, bytes for bytes."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, ANSWER_MS)
        self.socket.connect(endpoint)

    def send(self, frames: Sequence[bytes]) -> None:
        self.socket.send_multipart(list(frames))

    def receive(self) -> bytes:
        [frame] = self.socket.recv_multipart()
        return frame

    def from_core(self) -> FromCore:
        return decode_from_core(self.receive())

    def from_gateway(self) -> FromGateway:
        return decode_from_gateway(self.receive())

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextlib.contextmanager
def raw_peer(endpoint: str, *hello: object) -> Iterator[RawPeer]:
    """A peer; with ``hello`` that message was sent and answered."""
    peer = RawPeer(endpoint)
    try:
        if hello:
            peer.send([pack(list(hello))])
            peer.receive()
        yield peer
    finally:
        peer.close()


@contextlib.contextmanager
def running_core(**flags: object) -> Iterator[CoreProcess]:
    values: dict[str, object] = {
        "model": "pycoder",
        "num_threads": 1,
        "context_length": 512,
        "max_total_tokens": 4096,
        "max_running_requests": 8,
        **flags,
    }
    core = start_core(EngineConfig(**values))  # type: ignore[arg-type]
    try:
        yield core
    finally:
        core.stop()


class RunningGateway:
    """A gateway with a token, over a core; ``endpoint`` is where clients connect."""

    def __init__(self, core: CoreProcess) -> None:
        self._loop = LoopThread("gateway-test")
        self._client: CoreClient
        self._gateway: Gateway
        self._loop.run(self._open(core))
        self.endpoint = self._gateway.endpoint

    async def _open(self, core: CoreProcess) -> None:
        self._client, info = await connect_core(core.endpoint, core.token, timeout_s=20)
        service = AsyncService(self._client, Tokenizer(resolve_model("pycoder")), info)

        async def server_info() -> dict[str, object]:
            return {"threads": threading.active_count()}

        self._gateway = Gateway(service, ServerConfig(zmq_token=SDK_TOKEN), server_info, 60.0)

    def close(self) -> None:
        self._loop.run(self._gateway.close())
        self._loop.run(self._client.close())
        self._loop.close()
