"""A scripted core process: the real protocol, no model.

Token i of a request is ``(last prompt token + 1 + i) mod vocab_size``; a step emits ``per_step``
tokens of every running request and takes ``step_ms``. Run as a script it reads a CoreLaunch line
like the real core; ``FakeCore`` is the same thing for a test's own thread.
"""

import os
import signal
import sys
import threading
import time

import zmq

from outrider.engine_core.core_launch import CoreStatus, decode_launch, encode_line
from outrider.engine_core.ids import i32
from outrider.engine_core.messages import (
    AbortRequest,
    CallReply,
    CoreError,
    CoreInfo,
    CoreStats,
    FinishReason,
    FlushCache,
    FromCore,
    GenerateRequest,
    GetStats,
    Hello,
    Outputs,
    Ready,
    RequestOutput,
    RequestStats,
    Shutdown,
    ToCore,
    decode_to_core,
    encode,
)
from outrider.engine_core.refusal import Refused

VOCAB = 8192


def expected_tokens(prompt: list[int], count: int, vocab: int = VOCAB) -> list[int]:
    """What the fake core generates after ``prompt``."""
    return [(prompt[-1] + 1 + i) % vocab for i in range(count)]


class _Running:
    def __init__(self, client: bytes, request: GenerateRequest) -> None:
        self.client = client
        self.request = request
        self.prompt: list[int] = i32(request.prompt).tolist()
        self.emitted = 0


class FakeCore:
    """Serves one ROUTER until ``stop`` or a Shutdown message."""

    def __init__(
        self,
        endpoint: str,
        token: str,
        *,
        vocab: int = VOCAB,
        per_step: int = 1,
        step_ms: float = 1.0,
        drafter: str | None = "NGRAM",
        simulated: bool = False,
    ) -> None:
        self.simulated = simulated
        self.vocab = vocab
        self.token = token
        self.per_step = per_step
        self.step_s = step_ms / 1000
        self.drafter = drafter
        self.aborts = 0
        self.finished = 0
        self.steps = 0
        self.generated = 0
        self.running: dict[tuple[bytes, str], _Running] = {}
        self.stopping = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # A router throws away what a client that lags has no room for.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)

    def info(self) -> CoreInfo:
        return CoreInfo(
            model="fake",
            vocab_size=self.vocab,
            context_length=4096,
            eos_ids=(0,),
            max_total_tokens=65536,
            page_size=16,
            max_running_requests=48,
            drafter=self.drafter,
            num_draft_tokens=12,
            num_threads=1,
            device="cpu",
            dtype="float32",
            weight_bytes=1,
            pid=os.getpid(),
            simulated=self.simulated,
        )

    def serve(self) -> None:
        """Run until stopped."""
        try:
            while not self.stopping.is_set():
                timeout = 0 if self.running else 20
                while self._socket.poll(timeout):
                    client, frame = self._socket.recv_multipart()
                    self._take(client, decode_to_core(frame))
                    timeout = 0
                if self.running:
                    self._step()
                    time.sleep(self.step_s)
        finally:
            self._socket.close()
            self._context.term()

    def _send(self, client: bytes, message: FromCore) -> None:
        self._socket.send_multipart([client, encode(message)])

    def _take(self, client: bytes, message: ToCore | Refused) -> None:
        match message:
            case Refused():
                self._send(client, CoreError(message))
            case Hello(token=token):
                if token == self.token:
                    self._send(client, Ready(1, self.info()))
                else:
                    self._send(client, CoreError(Refused("token", "is wrong", 401)))
            case GenerateRequest(rid=rid):
                self.running[client, rid] = _Running(client, message)
            case AbortRequest(rid=rid, all_requests=everything):
                for key in [k for k in self.running if k[0] == client]:
                    if everything or key[1] == rid:
                        self.aborts += 1
                        finish = FinishReason("abort", message="aborted")
                        self._emit(self.running[key], [], finish)
            case GetStats(call=call):
                self._send(client, self.stats(call))
            case FlushCache(call=call):
                busy = Refused("flush_cache", "the core is busy; try again later")
                self._send(client, CallReply(call, busy if self.running else None, "flushed"))
            case Shutdown():
                self.stopping.set()
            case _:
                self._send(client, CoreError(Refused("message", "not scripted", 501)))

    def _step(self) -> None:
        self.steps += 1
        for one in list(self.running.values()):
            limit = one.request.params.max_new_tokens
            stop = min(limit, one.emitted + self.per_step)
            tokens = expected_tokens(one.prompt, stop, self.vocab)[one.emitted :]
            finish = FinishReason("length") if stop == limit else None
            self._emit(one, tokens, finish)

    def _emit(self, one: _Running, tokens: list[int], finish: FinishReason | None) -> None:
        one.emitted += len(tokens)
        self.generated += len(tokens)
        stats = None
        if finish is not None:
            self.finished += 1
            del self.running[one.client, one.request.rid]
            steps = max(0, one.emitted - 1) // max(1, self.per_step)
            stats = RequestStats(
                prompt_tokens=len(one.prompt),
                completion_tokens=one.emitted,
                cached_tokens=0,
                retractions=0,
                verify_ct=steps,
                verify_tokens=max(0, one.emitted - 1),
                correct_drafts=max(0, one.emitted - 1 - steps),
                proposed_drafts=steps * 11,
                plain_ct=0,
                histogram=(0, steps),
                spec_off_reason=None,
            )
        output = RequestOutput(
            one.request.rid, b"".join(t.to_bytes(4, "little") for t in tokens), (), finish, stats
        )
        self._send(one.client, Outputs((output,)))

    def stats(self, call: int) -> CoreStats:
        return CoreStats(
            call=call,
            running=len(self.running),
            waiting=0,
            free_pages=4096,
            total_pages=4096,
            cached_pages=0,
            steps=self.steps,
            prompt_tokens=0,
            generated_tokens=self.generated,
            cached_tokens=0,
            retractions=0,
            aborts=self.aborts,
            finished=self.finished,
            spec_drafts=self.steps if self.drafter else 0,
            spec_draft_tokens=11 * self.steps if self.drafter else 0,
            spec_accepted_tokens=(self.per_step - 1) * self.steps,
            spec_accepted_per_pos=(self.steps,) * (self.per_step - 1),
            spec_drafted_per_pos=(self.steps,) * 11,
            spec_verify_tokens=self.per_step * self.steps if self.drafter else 0,
            plain_rows=0 if self.drafter else self.steps,
            draft_invalid=0,
            plan_cpu=1e-4 * self.steps,
            commit_cpu=1e-4 * self.steps,
            propose_cpu=1e-4 * self.steps,
            worker_busy=self.step_s * self.steps,
            wait_for_drafts=0.0,
            ngram_nodes=0,
            evicted_pages=0,
        )


def _stop_at_eof() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    """Behave like ``python -m outrider.engine.core_process``; argv: per_step, step_ms."""
    launch = decode_launch(sys.stdin.buffer.readline())
    if launch.config.dtype == "float32" and launch.config.random_seed == 13:
        status = CoreStatus(status="error", message="13 is unlucky", field="random_seed")
        sys.stdout.buffer.write(encode_line(status))
        return 1
    core = FakeCore(
        launch.endpoint,
        launch.token,
        per_step=int(sys.argv[1]) if len(sys.argv) > 1 else 1,
        step_ms=float(sys.argv[2]) if len(sys.argv) > 2 else 1.0,
        drafter=launch.config.speculative_algorithm,
        simulated=launch.config.simulate_accept_length is not None,
    )
    threading.Thread(target=_stop_at_eof, daemon=True).start()
    print("noise that is not a status line", flush=True)
    sys.stdout.buffer.write(encode_line(CoreStatus(status="ready", info=core.info())))
    sys.stdout.buffer.flush()
    core.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
