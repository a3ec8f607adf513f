"""A training run from its spec to a folder that serves."""

import hashlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from ...engine_core.model_config import ModelConfig, ModelConfigError, load_model_config
from ...engine_core.model_path import ModelNotFound, resolve_model
from ...engine_core.refusal import Refused, RefusedError
from ...engine_core.tensor_shapes import IGNORABLE
from ...engine_core.train_checks import refuse_train
from ...engine_core.train_spec import TrainSpec, serving_shape
from ..weights import Checkpoint, WeightsError
from .batches import Mixture, Rows, RowSource, hold_out_windows, windows
from .calibration import calibrate, write_sts
from .card import model_card
from .checkpoint import FILE, SavedRun
from .dense import DenseTarget
from .export import tensor_bytes, write_draft
from .initial_draft import start_from
from .on_policy import Generate, OwnRows, Say, own_rows
from .recipe import Confident, RecipeRegistry, Setting
from .registry import default_recipes
from .run_folder import is_exported, make_folder, refuse_folders
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
    """Rows to learn from and to select by: text, and rows with the target's own text in them.

    ``marks``: fingerprints by field of the spec.
    """

    corpus: Rows
    selection_corpus: Rows
    own: OwnRows
    selection_own: OwnRows
    marks: dict[str, str]

    def counts(self, vocab_size: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """How often each token is learnt from; of own rows only the own text counts."""
        made = self.own.ids[self.own.own] if len(self.own.ids) else self.corpus.ravel()
        return np.bincount(made, minlength=vocab_size)


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
    _refuse(refuse_train(spec) or registry.refuse(spec.algorithm) or refuse_folders(spec))
    torch.manual_seed(spec.seed)
    output = Path(spec.output)
    device = _device(spec)
    compiled = device.type == "cuda" if spec.compile is None else spec.compile
    folder, config = find_target(spec)
    registry.check(spec, config)
    saved = SavedRun(output / FILE) if spec.resume else None
    if saved is not None:
        saved.check_spec(spec)
        if saved.position.part(spec) >= 1.0:
            steps = f"{output}: already has {saved.position.step} steps"
            same = is_exported(output) and serving_shape(saved.spec) == serving_shape(spec)
            # Looked at later, the others would see what rank 0 has written since.
            if world.lead([float(same)])[0]:
                say(f"{steps}; nothing to do")
                done = Outcome(True, saved.position, 0, None)
                return TrainReport(output, done, 0, time.monotonic() - begun, [])
            say(f"{steps}; the draft is written again")
    _refuse(make_folder(spec))
    target = load_target(folder, config, device, compiled)

    def prepare() -> Data:
        return _prepare(spec, folder, target, generate, say, saved)

    try:
        # The others find rank 0's rows.
        data = world.lead_first(prepare, prepare)
    except DataError as error:
        raise RefusedError(Refused("data", str(error).removeprefix("data: "))) from None
    counts = data.counts(target.config.vocab_size)
    rows = data.own.ids if len(data.own.ids) else data.corpus
    # As large as a batch, so that what is compiled for one fits the other.
    sample = torch.from_numpy(rows[: spec.batch_size]).long().to(device)
    setting = Setting(spec, target, counts, sample, compiled)
    recipe = registry.make(setting)
    if spec.initial_draft is not None and saved is None:
        changes = start_from(Path(spec.initial_draft), recipe)
        if changes is not None:
            say(f"begun with {spec.initial_draft}; {changes}")
    parameters = sum(leaf.numel() for leaf in recipe.parameters.values())
    say(f"{spec.algorithm}: {parameters / 1e6:.2f} M parameters to train on {device}")
    mixture, held = _mixture(spec, data, world, device), _held(data, device)
    trainer = Trainer(spec, recipe, mixture, held, world, saved, data.marks)
    outcome = trainer.run()
    exported = recipe.export(torch.bfloat16)
    size = tensor_bytes(exported.tensors)

    def write() -> None:
        sts = None
        if isinstance(recipe, Confident) and not outcome.interrupted:
            sts = calibrate(recipe, held, spec.selection_rows, spec.batch_size, say)
        own_tokens = int(data.own.own.sum())
        card = model_card(spec, exported, outcome, own_tokens, data.corpus.size, sts)
        write_draft(output, exported, card, folder if spec.algorithm == "STANDALONE" else None)
        write_sts(output, sts)

    world.lead_first(write, lambda: None)
    say(f"{output}: {size / 1e6:.2f} MB, {outcome.position.step} steps")
    return TrainReport(output, outcome, parameters, time.monotonic() - begun, _prompts(data))


def find_target(spec: TrainSpec) -> tuple[Path, ModelConfig]:
    """The target's folder and sizes. Raises RefusedError."""
    try:
        folder = resolve_model(spec.model)
        config = load_model_config(folder)
    except (ModelNotFound, ModelConfigError) as error:
        raise RefusedError(Refused("model", str(error).removeprefix("model: "))) from None
    if spec.sequence_length > config.context_length:
        reason = f"the target's context is {config.context_length}"
        raise RefusedError(Refused("sequence_length", reason))
    return folder, config


def load_target(
    folder: Path, config: ModelConfig, device: torch.device, compiled: bool
) -> DenseTarget:
    """The target in its dense form. Raises RefusedError."""
    try:
        checkpoint = Checkpoint(folder)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        target = DenseTarget(checkpoint, config, dtype, device, compiled)
        checkpoint.finish(IGNORABLE)
    except WeightsError as error:
        raise RefusedError(Refused("model", str(error).removeprefix("model: "))) from None
    return target


def _device(spec: TrainSpec) -> torch.device:
    if spec.device == "cuda" and not torch.cuda.is_available():
        raise RefusedError(Refused("device", "there is no CUDA device; use --device cpu"))
    cuda = spec.device == "cuda" or (spec.device == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if cuda else "cpu")


def _prepare(
    spec: TrainSpec,
    folder: Path,
    target: DenseTarget,
    generate: Generate | None,
    say: Say,
    saved: SavedRun | None,
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
    tokens, length = stream.size + held.size, spec.sequence_length
    if spec.selection_data:
        try:
            held = read(spec.selection_data, ())[0]
        except DataError as error:
            _refuse(Refused("selection_data", str(error).removeprefix("data: ")))
        if held.size < length:
            reason = f"{held.size} tokens are too few for rows of {length}"
            raise RefusedError(Refused("selection_data", reason))
    corpus, held_rows = windows(stream, length), windows(held, length)
    if not len(held_rows):
        corpus, held_rows = hold_out_windows(corpus)
        stream, held = corpus.ravel(), held_rows.ravel()
    if not len(corpus) or not len(held_rows):
        need = f"rows of {length}" if spec.selection_data else f"rows of {length} and a selection"
        raise DataError(f"data: {tokens} tokens are too few for {need}")
    # What is held out of the data belongs to it.
    marks = (
        {"data": _mark(stream), "selection_data": _mark(held)}
        if spec.selection_data
        else {"data": _mark(stream, held)}
    )
    if saved is not None:
        saved.check_data(marks)
    say(f"data: {stream.size / 1e6:.2f} M tokens to learn from, {held.size / 1e6:.2f} M held out")
    own = selection_own = OwnRows(
        np.empty((0, length), dtype=np.int32), np.empty((0, length), dtype=np.bool_)
    )
    if spec.on_policy_rows:
        own = own_rows(spec, "own_rows", stream, spec.on_policy_rows, target, generate, say)
        selection_own = own_rows(
            spec, "selection_rows", held, spec.selection_rows, target, generate, say
        )
    return Data(corpus, held_rows, own, selection_own, marks)


def _mark(*streams: Tokens) -> str:
    made = hashlib.sha256()
    for stream in streams:
        made.update(str(stream.size).encode())
        made.update(stream.tobytes())
    return made.hexdigest()


def _mixture(spec: TrainSpec, data: Data, world: World, device: torch.device) -> Mixture:
    own = round(spec.on_policy_share * spec.batch_size) if len(data.own.ids) else 0
    sources: list[tuple[RowSource, int]] = []
    if own:
        sources.append((RowSource(*data.own, spec.seed, device), own))
    if own < spec.batch_size:
        rows = RowSource(data.corpus, None, spec.seed + 1, device)
        sources.append((rows, spec.batch_size - own))
    return Mixture(sources)


def _held(data: Data, device: torch.device) -> RowSource:
    if len(data.selection_own.ids):
        return RowSource(*data.selection_own, 0, device)
    return RowSource(data.selection_corpus, None, 0, device)


def _prompts(data: Data, count: int = 40) -> list[list[int]]:
    ids, own = data.selection_own
    if len(ids):
        return [
            row[: marks.argmax()].tolist() for row, marks in zip(ids[:count], own, strict=False)
        ]
    half = data.selection_corpus.shape[1] // 2
    return [row[:half].tolist() for row in data.selection_corpus[:count]]


def _refuse(refused: Refused | None) -> None:
    if refused is not None:
        raise RefusedError(refused)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _silent(text: str) -> None:
    del text
