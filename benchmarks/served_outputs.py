"""Rows of the served matrix about what answers hold: log-probabilities, ids, chunks."""

from served_answers import Ask
from served_asks import REGEX, chat, completion, native

from outrider.frontend.lossless.features import Known


def logprobs(known: Known) -> list[Ask]:
    """Of the tokens that came."""
    drawn = [{"temperature": 0.8 * (i % 2), "seed": i} for i in range(4)]
    return [
        *(native(i, sampling, return_logprob=True) for i, sampling in enumerate(drawn)),
        native(0, None, return_logprob=True, return_text_in_logprobs=True),
        completion(1, logprobs=0, temperature=0.7, seed=2, repetition_penalty=1.2),
        completion(2, logprobs=3),
        chat(3, logprobs=True),
    ]


def top_logprobs(known: Known) -> list[Ask]:
    """And of the best ones."""
    drawn = [{"temperature": 0.8 * (i % 2), "seed": i} for i in range(4)]
    return [
        *(
            native(i, sampling, return_logprob=True, top_logprobs_num=1 + 2 * i)
            for i, sampling in enumerate(drawn)
        ),
        native(0, {"regex": REGEX}, return_logprob=True, top_logprobs_num=3),
        chat(1, logprobs=True, top_logprobs=4),
        chat(2, logprobs=True, top_logprobs=2, temperature=1.0, seed=4, stream=True),
    ]


def prompt_logprobs(known: Known) -> list[Ask]:
    """Of the prompt's tokens."""
    two = {"n": 2, "temperature": 0.8, "seed": 1}
    return [
        native(0, None, return_logprob=True, logprob_start_len=0, top_logprobs_num=2),
        native(1, None, return_logprob=True, logprob_start_len=5),
        native(2, two, return_logprob=True, logprob_start_len=3, stream=True),
        completion(2, prompt_logprobs=2, temperature=0.7, seed=2),
        completion(3, prompt_logprobs=0, logprobs=2),
        chat(3, prompt_logprobs=1),
    ]


def echo(known: Known) -> list[Ask]:
    """The prompt before the text, with and without log-probabilities."""
    return [
        completion(0, echo=True),
        completion(1, echo=True, logprobs=2, temperature=0.8, seed=1),
        completion(2, echo=True, logprobs=1, stream=True),
        completion(3, echo=True, logprobs=0, max_tokens=0),
    ]


def best_of(known: Known) -> list[Ask]:
    """The likeliest of several samples."""
    return [
        completion(i, n=2, best_of=4, temperature=1.0, seed=i, logprobs=i or None) for i in range(3)
    ]


def ids(known: Known) -> list[Ask]:
    """Token ids in OpenAI's answers."""
    return [
        completion(0),
        completion(1, stream=True),
        completion(2, n=2, temperature=1, seed=1),
        chat(3),
        chat(0, stream=True),
    ]


def streams(known: Known) -> list[Ask]:
    """Streams at each endpoint."""
    drawn, usage = {"temperature": 0.8, "seed": 1}, {"include_usage": True}
    return [
        native(0, None, stream=True),
        native(1, {**drawn, "n": 2}, stream=True, return_logprob=True),
        completion(1, stream=True),
        completion(2, stream=True, stream_options=usage, logprobs=1, **drawn),
        completion(3, stream=True, stop=known.text(known.greedy[3])[10:15]),
        chat(2, stream=True),
        chat(3, stream=True, stream_options=usage, n=2, **drawn),
    ]
