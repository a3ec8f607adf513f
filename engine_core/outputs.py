"""What clients are told of a request."""

from .messages import RequestOutput
from .plan import TokenLogprobs
from .request import Request


def progress_output(request: Request, stream_interval: int) -> RequestOutput | None:
    """News of a request: all of it at the end, before that only what is due in a stream.

    The first tokens of a stream come at once, the next after ``stream_interval`` tokens.
    """
    progress = request.progress
    if progress.finish is not None:
        return finish_output(request)
    waiting = len(progress.tokens) - progress.sent
    if not request.stream or waiting == 0 or (progress.sent > 0 and waiting < stream_interval):
        return None
    tokens, logprobs = progress.take_new()
    return RequestOutput(request.rid, tokens, logprobs, prompt_logprobs=_scores(request))


def finish_output(request: Request) -> RequestOutput:
    """The last output of a finished request."""
    progress = request.progress
    tokens, logprobs = progress.take_new()
    finish, stats = progress.finish, progress.stats()
    return RequestOutput(request.rid, tokens, logprobs, finish, stats, _scores(request))


def _scores(request: Request) -> tuple[TokenLogprobs, ...]:
    scores = request.progress.prompt_scores
    return () if scores is None else scores.take()
