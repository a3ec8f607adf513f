"""What can be said of a draft and its target from their files' headers, without loading either."""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import msgspec

from .block_tensors import MARKOV
from .config import EngineConfig, served_context
from .draft_config import DraftAlgorithm, DraftConfig
from .draft_config_json import misfits, parse_draft_config
from .draft_finding import Finding, Level, failed
from .draft_folder import draft_folder, tokenizer_folder
from .draft_names import our_name
from .draft_source import find_draft
from .drafter_spec import find_drafter
from .model_config import ModelConfig, ModelConfigError, load_model_config
from .model_path import resolve_model
from .refusal import Refused, RefusedError
from .safetensors_header import HeaderError, tensor_dtypes
from .tokenizer_match import match_tokenizers
from .trained_length import trained_length

_FLOATS = ("bfloat16", "float16", "float32")
_INDEXES = ("d2t", "t2d")  # of whole numbers by design
# The check that a field of config.json belongs to.
_CHECK_OF = {
    "vocab_size": "vocabulary",
    "draft_vocab_size": "vocabulary",
    "hot_vocab_size": "vocabulary",
    "hidden_size": "hidden width",
    "target_hidden_size": "hidden width",
    "eagle_aux_hidden_state_layer_ids": "captured layers",
    "aux_hidden_state_layer_ids": "captured layers",
    "target_layer_ids": "captured layers",
    "num_target_layers": "captured layers",
    "block_size": "block",
    "mask_token_id": "block",
    "mask_token": "block",
    "markov_rank": "block",
    "markov_head_type": "block",
    "num_aux_hidden_states": "captured layers",
    "max_position_embeddings": "positions",
    "quantization_config": "types",
    "architectures": "architecture",
}


def check_draft(config: EngineConfig) -> Iterator[Finding]:
    """Check the draft model of ``config``, one finding after the other; nothing for algorithms
    without one. Raises RefusedError, ModelNotFound for a target that cannot be used by itself,
    and for a draft that is not there.
    """
    name = config.speculative_algorithm
    spec = None if name is None else find_drafter(name)
    if spec is None or isinstance(spec, Refused) or not spec.has_model:
        return
    target_folder = resolve_model(config.model, config.revision)
    try:
        target = load_model_config(target_folder)
    except ModelConfigError as error:
        raise RefusedError(Refused("model", str(error))) from None
    context = served_context(config, target.context_length)
    if isinstance(context, Refused):
        raise RefusedError(context)
    target = msgspec.structs.replace(target, context_length=context)
    folder = draft_folder(config, spec.name)
    alone = spec.name == "STANDALONE"
    yield match_tokenizers(target_folder, folder, alone)
    try:
        algorithm = cast(DraftAlgorithm, spec.name)
        draft = parse_draft_config(folder, target, algorithm, tokenizer_folder(config, spec.name))
    except ModelConfigError as error:
        yield _misfit(str(error).removeprefix(f"{folder / 'config.json'}: "))
        return
    fit = list(_fit(draft, target))
    yield from fit
    length = trained_length(draft, context, config.speculative_draft_window_size)
    if length is not None:
        level: Level = "warning" if length.remedy else "ok"
        yield Finding("trained length", level, length.found, length.remedy)
    if (config.speculative_draft_load_format or config.load_format) != "dummy":
        yield _types(folder, target)
    if all(finding.level != "failed" for finding in fit):
        yield _whole(config, target)


def algorithm_of(folder: Path) -> DraftAlgorithm:
    """What a draft's tensors say that it is. Raises HeaderError."""
    names = {our_name(name) for name in tensor_dtypes(folder)}
    if "model.hidden_norm.weight" in names:
        markov = any(name.startswith(MARKOV) for name in names)
        return "DSPARK" if markov else "DFLASH"
    if "model.layers.0.hidden_norm.weight" in names:
        return "EAGLE3"
    return "EAGLE" if "model.fc.weight" in names else "STANDALONE"


def _fit(draft: DraftConfig, target: ModelConfig) -> Iterator[Finding]:
    """Findings of what misfits, and of what was looked at and fits."""
    wrong = [_misfit(reason) for reason in misfits(draft, target)]
    bad = {finding.check for finding in wrong}
    yield from wrong
    yield from (finding for finding in _fitting(draft, target) if finding.check not in bad)


def _misfit(reason: str) -> Finding:
    field = reason.partition(": ")[0].rpartition(".")[2]
    return failed(_CHECK_OF.get(field, "config.json"), reason)


def _fitting(draft: DraftConfig, target: ModelConfig) -> Iterator[Finding]:
    model, vocab = draft.model, target.vocab_size
    known = draft.draft_vocab_size
    part = "" if known == vocab else f", of which the draft knows {known} ({known / vocab:.0%})"
    yield Finding("vocabulary", "ok", f"{vocab} ids{part}")
    yield _end(model, target)
    match draft.algorithm:
        case "STANDALONE":
            yield Finding(
                "hidden width", "ok", f"{model.hidden_size}, by itself: it takes text alone"
            )
        case "EAGLE":
            yield Finding("hidden width", "ok", f"{model.hidden_size} is the target's")
            yield Finding("captured layers", "ok", "the target's final hidden state")
        case "EAGLE3":
            taken = (
                f"{draft.feature_size} features of {target.hidden_size}-wide streams become "
                f"{model.hidden_size}"
            )
            yield Finding("hidden width", "ok", taken)
            yield _captured(draft, target)
        case "DFLASH" | "DSPARK":
            yield Finding("hidden width", "ok", f"{model.hidden_size} is the target's")
            yield _captured(draft, target)
            yield _block(draft)
    yield Finding(
        "positions",
        "ok",
        f"{model.context_length} of the draft, {target.context_length} of the target as served",
    )


def _captured(draft: DraftConfig, target: ModelConfig) -> Finding:
    layers = draft.feature_layers
    if not layers:
        return Finding("captured layers", "ok", "the target's final hidden state")
    outputs = ", ".join(str(layer - 1) for layer in layers if layer)
    parts = ["the embedding"] if 0 in layers else []
    parts += [f"outputs of layers {outputs}"] if outputs else []
    count = target.num_hidden_layers
    return Finding("captured layers", "ok", f"{' and '.join(parts)}, of {count} counted from 0")


def _block(draft: DraftConfig) -> Finding:
    """What a block is; a warning where config.json and the target or a habit do not agree."""
    block = draft.block
    assert block is not None, "it is a block draft's"
    what = "the token at its own position" if block.first_row else "the next token"
    markov = "" if block.markov is None else f", a {block.markov.kind} Markov head"
    if block.markov is not None and not block.confidence:
        markov += ", no confidence head: verify lengths go by the length policy"
    found = (
        f"{block.rows} rows of which {block.drafts} draft, each {what}; mask token "
        f"{block.mask_token_id}{markov}"
    )
    if draft.notes:
        return Finding("block", "warning", f"{found}; {'; '.join(draft.notes)}")
    return Finding("block", "ok", found)


def _end(draft: ModelConfig, target: ModelConfig) -> Finding:
    """Whether both end a text by the same tokens; the target's count, whatever the draft says."""
    theirs, ours = set(draft.eos_token_ids), set(target.eos_token_ids)
    if not theirs or theirs & ours or not ours:
        return Finding("end of text", "ok", f"token ids {sorted(ours)}, those of the target")
    return Finding(
        "end of text",
        "warning",
        f"{sorted(theirs)} in the draft's config.json, {sorted(ours)} in the target's",
        "often a sign of another tokenizer or chat format; generation follows the target's",
    )


def _types(folder: Path, target: ModelConfig) -> Finding:
    try:
        stored = tensor_dtypes(folder)
    except HeaderError as error:
        return failed("types", f"{error}; fetch the file again")
    kinds = {name: kind for name, kind in stored.items() if name.rsplit(".")[-1] not in _INDEXES}
    odd = next((name for name, kind in kinds.items() if kind not in _FLOATS), None)
    if odd is not None:
        return failed(
            "types",
            f"tensor {odd!r} is {kinds[odd]}, of a quantised or foreign checkpoint; use the "
            "draft's bfloat16, float16 or float32 checkpoint",
        )
    if not kinds:
        return failed(
            "types", f"{folder} has no *.safetensors file; convert pytorch_model.bin to it"
        )
    found = " and ".join(sorted(set(kinds.values())))
    if set(kinds.values()) == {target.torch_dtype}:
        return Finding("types", "ok", f"{found}, as the target's")
    if "float16" in kinds.values() and target.torch_dtype == "bfloat16":
        return Finding(
            "types",
            "warning",
            f"{found} beside a bfloat16 target, whose streams may leave float16's range",
            "it runs in the target's type; prefer a bfloat16 checkpoint of the draft",
        )
    return Finding("types", "ok", f"{found}; both run in the engine's type")


def _whole(config: EngineConfig, target: ModelConfig) -> Finding:
    """What starting would refuse beyond that, and how much is drafted."""
    try:
        source = find_draft(config, target)
    except RefusedError as error:
        return failed(error.refused.field, error.refused.reason)
    assert source is not None, "the algorithm has a draft model"
    steps, topk, nodes = msgspec.structs.astuple(source.shape)
    return Finding(
        "shape",
        "ok",
        f"{steps} steps of topk {topk}; a row verifies {nodes} nodes, the bonus token included",
    )
