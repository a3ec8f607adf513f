"""The target's own greedy text, which is what a draft meets when it serves."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from ...engine_core.train_spec import TrainSpec
from .batches import Marks, Rows, prompt_rows
from .dense import DenseTarget
from .token_files import DataError, Tokens

# Prompts and a number of new tokens: each prompt's continuation, by the engine itself.
Generate = Callable[[Sequence[Sequence[int]], int], Sequence[Sequence[int]]]
Say = Callable[[str], None]

_KV_BYTES = {"cuda": 16 << 30, "cpu": 64 << 20}
_MOST_ROWS = 4096


_LEAST_PROMPT = 32


class OwnRows(NamedTuple):
    """``ids`` int32[n, T] and ``own`` bool[n, T]: which of them the target chose itself."""

    ids: Rows
    own: Marks


class _Made(msgspec.Struct, frozen=True):
    """What a cached file holds. ``begins``: of the target's text in rows that have prompts in
    turns; ``text``: a hash of the rows before it was written there.
    """

    model: str
    sequence_length: int
    on_policy_tokens: int
    begins: tuple[tuple[int, ...], ...]
    rows: int
    seed: int
    text: str


def own_rows(
    spec: TrainSpec,
    name: str,
    stream: Tokens,
    count: int,
    target: DenseTarget,
    generate: Generate | None,
    say: Say,
) -> OwnRows:
    """Rows [count, sequence_length] of the stream's text in which prompts go on in the target's.

    Kept as ``name``.npz in ``on_policy_cache``, or the output folder, and taken from there the
    next time. Raises DataError for a file there that was made otherwise, or of other text.
    """
    folder = Path(spec.on_policy_cache or spec.output)
    path, about = folder / f"{name}.npz", folder / f"{name}.json"
    ids = prompt_rows(stream, spec.sequence_length, count, spec.seed + len(name))
    prompts = spec.on_policy_prompts or (spec.sequence_length - spec.on_policy_tokens,)
    begins = tuple(tuple(continuations(spec, prompt)) for prompt in prompts)
    made = _Made(
        spec.model,
        spec.sequence_length,
        spec.on_policy_tokens,
        begins,
        count,
        spec.seed,
        hashlib.sha256(ids.tobytes()).hexdigest(),
    )
    if path.is_file() and about.is_file():
        try:
            then = msgspec.json.decode(about.read_bytes(), type=_Made)
        except msgspec.DecodeError as error:
            raise DataError(
                f"{about}: says not what {path.name} is ({error}); remove both"
            ) from None
        if then != made:
            raise DataError(f"{path}: was made with {then}, now asked for {made}; remove it")
        with np.load(path, allow_pickle=False) as kept:
            return OwnRows(kept["ids"], kept["own"])
    if spec.on_policy_source == "engine" and generate is None:
        raise DataError("on_policy_source: the engine was not handed over; use dense")
    say(f"{name}: {count} rows with continuations of {spec.on_policy_tokens} tokens")
    own = np.zeros(ids.shape, dtype=np.bool_)
    for index, places in enumerate(begins):
        part = slice(index, None, len(begins))
        for begin in places:
            end = begin + spec.on_policy_tokens
            before = ids[part, :begin]
            if spec.on_policy_source == "engine" and generate is not None:
                texts = generate([row.tolist() for row in before], spec.on_policy_tokens)
                ids[part, begin:end] = np.array(texts, dtype=np.int32)
            else:
                ids[part, begin:end] = _dense(before, spec.on_policy_tokens, target)
            own[part, begin:end] = True
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(path, ids=ids, own=own)
    about.write_bytes(msgspec.json.encode(made))
    return OwnRows(ids, own)


def continuations(spec: TrainSpec, prompt: int) -> list[int]:
    """Where the target's text begins in a row whose first prompt has ``prompt`` tokens.

    Further prompts of as many tokens (32 at least) go on behind it, each in the target's text, as
    long as there is room.
    """
    tokens = spec.on_policy_tokens
    last, apart = spec.sequence_length - tokens, tokens + max(prompt, _LEAST_PROMPT)
    return [prompt, *range(prompt + apart, last + 1, apart)]


def _dense(prompts: Rows, new_tokens: int, target: DenseTarget) -> Rows:
    config = target.config
    item = torch.empty(0, dtype=target.dtype).element_size()
    row_bytes = (
        2 * config.num_hidden_layers * config.kv_size * (prompts.shape[1] + new_tokens) * item
    )
    size = max(1, min(_MOST_ROWS, _KV_BYTES[target.device.type] // row_bytes))
    made: list[Rows] = []
    for begin in range(0, len(prompts), size):
        ids = torch.from_numpy(prompts[begin : begin + size]).long().to(target.device)
        made.append(target.generate(ids, new_tokens).int().cpu().numpy())
    return np.concatenate(made)
