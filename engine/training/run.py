"""A training run from its spec to a folder that serves."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from ...engine_core.model_config import ModelConfigError, load_model_config
from ...engine_core.model_path import ModelNotFound, resolve_model
from ...engine_core.refusal import Refused, RefusedError
from ...engine_core.tensor_shapes import IGNORABLE
from ...engine_core.train_spec import TrainSpec, refuse_train
from ..weights import Checkpoint, WeightsError
from .batches import Mixture, Rows, RowSource, hold_out_windows, windows
from .card import model_card
from .dense import DenseTarget
from .export import tensor_bytes, write_draft
from .on_policy import Generate, Say, own_rows
from .recipe import RecipeRegistry, Setting
from .registry import default_recipes
from .token_files import DataError, Tokens, read_split
from .trainer import Outcome, Trainer
from .world import World, this_world


@dataclass(frozen=True, slots=True)
class TrainReport:
    """``folder`` holds the draft; ``prompts``: selection prompts to measure it with."""

    folder: Path
    outcome: Outcome
    parameters: int
    seconds: float
    prompts: list[list[int]]


@dataclass(frozen=True, slots=True)
class Data:
    """Rows to learn from and to select by, and what they are. ``own`` rows end in the target's
    own text, which begins at ``own_from``.
    """

    corpus: Rows
    selection_corpus: Rows
    own: Rows
    selection_own: Rows
    own_from: int

    def counts(self, vocab_size: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """How often each token is learnt from; of own rows only the own text counts."""
        made = self.own[:, self.own_from :] if len(self.own) else self.corpus
        return np.bincount(made.ravel(), minlength=vocab_size)


def train_draft(
    spec: TrainSpec,
    generate: Generate | None = None,
    recipes: RecipeRegistry | None = None,
) -> TrainReport:
    """Train, export, and say what came out. Raises RefusedError for what cannot be trained.

    ``generate``: the engine's own text, for ``on_policy_source`` "engine". In a process group of
    torch.distributed all its processes train one draft, each on ``batch_size`` rows a step, and
    come back once rank 0 has written it; ``output`` and ``on_policy_cache`` are folders that all
    see. Where rank 0 raises, the others raise RuntimeError.
    """
    begun = time.monotonic()
    world = this_world()
    say = _say if world.leads else _silent
    registry = recipes or default_recipes()
    refused = refuse_train(spec) or registry.refuse(spec.algorithm)
    if refused is not None:
        raise RefusedError(refused)
    torch.manual_seed(spec.seed)
    output = Path(spec.output)
    output.mkdir(parents=True, exist_ok=True)
    device = _device(spec)
    compiled = device.type == "cuda" if spec.compile is None else spec.compile
    folder, target = load_target(spec, device, compiled)
    registry.check(spec, target.config)

    def prepare() -> Data:
        return _prepare(spec, folder, target, generate, say)

    try:
        # The others find rank 0's rows.
        data = world.lead_first(prepare, prepare)
    except DataError as error:
        raise RefusedError(Refused("data", str(error).removeprefix("data: "))) from None
    counts = data.counts(target.config.vocab_size)
    rows = data.own if len(data.own) else data.corpus
    # As large as a batch, so that what is compiled for one fits the other.
    sample = torch.from_numpy(rows[: spec.batch_size]).long().to(device)
    setting = Setting(spec, target, counts, sample, compiled)
    recipe = registry.make(setting)
    parameters = sum(leaf.numel() for leaf in recipe.parameters.values())
    say(f"{spec.algorithm}: {parameters / 1e6:.2f} M parameters to train on {device}")
    trainer = Trainer(spec, recipe, _mixture(spec, data, world, device), _held(data, device), world)
    outcome = trainer.run()
    exported = recipe.export(torch.bfloat16)
    size = tensor_bytes(exported.tensors)

    def write() -> None:
        card = model_card(spec, exported, outcome, data.own.size, data.corpus.size)
        write_draft(output, exported, card, folder if spec.algorithm == "STANDALONE" else None)

    world.lead_first(write, lambda: None)
    say(f"{output}: {size / 1e6:.2f} MB, {outcome.position.step} steps")
    return TrainReport(output, outcome, parameters, time.monotonic() - begun, _prompts(data))


def load_target(spec: TrainSpec, device: torch.device, compiled: bool) -> tuple[Path, DenseTarget]:
    """The target's folder and its dense form. Raises RefusedError."""
    try:
        folder = resolve_model(spec.model)
        config = load_model_config(folder)
        if spec.sequence_length > config.context_length:
            raise RefusedError(
                Refused("sequence_length", f"the target's context is {config.context_length}")
            )
        checkpoint = Checkpoint(folder)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        target = DenseTarget(checkpoint, config, dtype, device, compiled)
        checkpoint.finish(IGNORABLE)
    except (ModelNotFound, ModelConfigError, WeightsError) as error:
        raise RefusedError(Refused("model", str(error).removeprefix("model: "))) from None
    return folder, target


def _device(spec: TrainSpec) -> torch.device:
    if spec.device == "cuda" and not torch.cuda.is_available():
        raise RefusedError(Refused("device", "there is no CUDA device; use --device cpu"))
    cuda = spec.device == "cuda" or (spec.device == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if cuda else "cpu")


def _prepare(
    spec: TrainSpec, folder: Path, target: DenseTarget, generate: Generate | None, say: Say
) -> Data:
    config = target.config
    tokenizer = None
    if (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    eos = config.eos_token_ids[0] if config.eos_token_ids else 0

    def read(sources: tuple[str, ...], selection: tuple[int, ...]) -> tuple[Tokens, Tokens]:
        return read_split(
            sources, tokenizer, eos, config.vocab_size, selection, spec.excluded_bytes
        )

    stream, held = read(spec.data, spec.selection_bytes)
    if spec.selection_data:
        held = read(spec.selection_data, ())[0]
    length = spec.sequence_length
    corpus, held_rows = windows(stream, length), windows(held, length)
    if not len(held_rows):
        corpus, held_rows = hold_out_windows(corpus)
        stream, held = corpus.ravel(), held_rows.ravel()
    say(f"data: {stream.size / 1e6:.2f} M tokens to learn from, {held.size / 1e6:.2f} M held out")
    own = selection_own = np.empty((0, length), dtype=np.int32)
    if spec.on_policy_rows:
        own = own_rows(spec, "own_rows", stream, spec.on_policy_rows, target, generate, say)
        selection_own = own_rows(
            spec, "selection_rows", held, spec.selection_rows, target, generate, say
        )
    return Data(corpus, held_rows, own, selection_own, length - spec.on_policy_tokens)


def _mixture(spec: TrainSpec, data: Data, world: World, device: torch.device) -> Mixture:
    own = round(spec.on_policy_share * spec.batch_size) if len(data.own) else 0
    sources: list[tuple[RowSource, int]] = []
    if own:
        sources.append((RowSource(data.own, data.own_from, spec.seed, device), own))
    if own < spec.batch_size:
        rows = RowSource(data.corpus, 0, spec.seed + 1, device)
        sources.append((rows, spec.batch_size - own))
    return Mixture(sources)


def _held(data: Data, device: torch.device) -> RowSource | None:
    if len(data.selection_own):
        return RowSource(data.selection_own, data.own_from, 0, device)
    return RowSource(data.selection_corpus, 0, 0, device) if len(data.selection_corpus) else None


def _prompts(data: Data, count: int = 40) -> list[list[int]]:
    if len(data.selection_own):
        return [row[: data.own_from].tolist() for row in data.selection_own[:count]]
    half = data.selection_corpus.shape[1] // 2
    return [row[:half].tolist() for row in data.selection_corpus[:count]]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _silent(text: str) -> None:
    del text
