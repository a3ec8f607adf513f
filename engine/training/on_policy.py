"""The target's own greedy text, which is what a draft meets when it serves."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from ...engine_core.train_spec import TrainSpec
from .batches import Rows, prompt_rows
from .dense import DenseTarget
from .token_files import DataError, Tokens

# Prompts and a number of new tokens: each prompt's continuation, by the engine itself.
Generate = Callable[[Sequence[Sequence[int]], int], Sequence[Sequence[int]]]
Say = Callable[[str], None]

_KV_BYTES = {"cuda": 16 << 30, "cpu": 64 << 20}
_MOST_ROWS = 4096


class _Made(msgspec.Struct, frozen=True):
    """What a cached file holds; ``prompts``: a hash of the text that its rows begin with."""

    model: str
    sequence_length: int
    on_policy_tokens: int
    rows: int
    seed: int
    prompts: str = ""


def own_rows(
    spec: TrainSpec,
    name: str,
    stream: Tokens,
    count: int,
    target: DenseTarget,
    generate: Generate | None,
    say: Say,
) -> Rows:
    """int32[count, sequence_length]: prompts of the stream, each with the target's continuation.

    Kept as ``name``.npy in ``on_policy_cache``, or the output folder, and taken from there the
    next time. Raises DataError for a file there that was made otherwise, or of other text.
    """
    folder = Path(spec.on_policy_cache or spec.output)
    path, about = folder / f"{name}.npy", folder / f"{name}.json"
    prompts = prompt_rows(
        stream, spec.sequence_length - spec.on_policy_tokens, count, spec.seed + len(name)
    )
    made = _Made(
        spec.model,
        spec.sequence_length,
        spec.on_policy_tokens,
        count,
        spec.seed,
        hashlib.sha256(prompts.tobytes()).hexdigest(),
    )
    if path.is_file() and about.is_file():
        then = msgspec.json.decode(about.read_bytes(), type=_Made)
        if then != made:
            raise DataError(f"{path}: was made with {then}, now asked for {made}; remove it")
        rows: Rows = np.load(path, allow_pickle=False)
        return rows
    if spec.on_policy_source == "engine":
        if generate is None:
            raise DataError("on_policy_source: the engine was not handed over; use dense")
        say(f"{name}: {count} continuations of {spec.on_policy_tokens} tokens by the engine")
        texts = generate([row.tolist() for row in prompts], spec.on_policy_tokens)
        own = np.array(texts, dtype=np.int32)
    else:
        say(f"{name}: {count} continuations of {spec.on_policy_tokens} tokens")
        own = _dense(prompts, spec.on_policy_tokens, target)
    rows = np.concatenate([prompts, own], axis=1)
    folder.mkdir(parents=True, exist_ok=True)
    np.save(path, rows)
    about.write_bytes(msgspec.json.encode(made))
    return rows


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
