"""The draft model of a configuration, found and checked before anything is loaded."""

from pathlib import Path
from typing import Literal, NamedTuple, cast

import msgspec

from .block_shape import block_notes, resolve_block
from .config import EngineConfig, served_context
from .draft_config import DraftAlgorithm, DraftConfig, SpecShape
from .draft_config_json import load_draft_config
from .draft_folder import draft_folder, tokenizer_folder
from .drafter_spec import DrafterSpec, find_drafter
from .model_config import ModelConfig, ModelConfigError
from .model_path import ModelNotFound
from .ragged_verify import refuse_ragged
from .refusal import Refused, RefusedError
from .safetensors_header import HeaderError, tensor_dtypes
from .spec_shape import corrected, refuse_survival, resolve_shape
from .token_map import read_token_map
from .trained_length import trained_length

_FIELD = "speculative_draft_model_path"


class DraftSource(NamedTuple):
    """Where a draft is, what it is, and how much it drafts a round.

    ``stored``: its tensors' types by name, empty for dummy weights; ``target_dtype``: that of the
    target's checkpoint. ``token_map``: the target's id of each of its draft ids, where the user
    gave them. ``int8``: its matrices are to be rounded. ``notes``: what to tell the user.
    """

    folder: Path
    config: DraftConfig
    shape: SpecShape
    load_format: Literal["auto", "safetensors", "dummy"]
    stored: dict[str, str]
    target_dtype: str
    token_map: tuple[int, ...] | None
    int8: bool = False
    notes: tuple[str, ...] = ()


def find_draft(config: EngineConfig, target: ModelConfig) -> DraftSource | None:
    """The draft model beside ``target``; None for algorithms without one. Raises RefusedError,
    also for a context that the target cannot serve.

    This resolves how much is drafted: see ``EngineConfig.with_shape``.
    """
    context = served_context(config, target.context_length)
    if isinstance(context, Refused):
        raise RefusedError(context)
    if config.speculative_algorithm is None:
        return None
    spec = find_drafter(config.speculative_algorithm)
    if isinstance(spec, Refused):
        raise RefusedError(spec)
    if not spec.has_model:
        return None
    try:
        found = _find(config, spec, msgspec.structs.replace(target, context_length=context))
    except (ModelNotFound, ModelConfigError, HeaderError) as error:
        reason = str(error).removeprefix(f"{_FIELD}: ")
        raise RefusedError(Refused(_FIELD, reason)) from error
    if isinstance(found, Refused):
        raise RefusedError(found)
    return found


def _find(config: EngineConfig, spec: DrafterSpec, target: ModelConfig) -> DraftSource | Refused:
    """Raises RefusedError, ModelNotFound, ModelConfigError, HeaderError."""
    folder = draft_folder(config, spec.name)
    algorithm = cast(DraftAlgorithm, spec.name)
    draft = load_draft_config(folder, target, algorithm, tokenizer_folder(config, spec.name))
    load_format = config.speculative_draft_load_format or config.load_format
    stored = {} if load_format == "dummy" else tensor_dtypes(folder)
    if draft.block is not None:
        shape = resolve_block(config, spec.name, draft.block.drafts, draft.defaults)
        if isinstance(shape, Refused):
            return shape
        notes = [*draft.notes, *block_notes(config, spec.name, draft.defaults, shape)]
        window = config.speculative_draft_window_size
        length = trained_length(draft, target.context_length, window)
        if length is not None and length.note is not None:
            notes.append(length.note)
        confidence = draft.block.confidence
        if spec.gives_survival and not confidence:
            refused = _refuse_survival(config, spec)
            if refused is not None:
                return refused
        asked = config.speculative_ragged_verify_mode in ("compact", "cap-accept")
        block = msgspec.structs.replace(
            draft.block, drafts=shape.steps, confidence=confidence and asked
        )
        draft = msgspec.structs.replace(draft, block=block)
        dtype = target.torch_dtype
        return DraftSource(
            folder, draft, shape, load_format, stored, dtype, None, notes=tuple(notes)
        )
    token_map: tuple[int, ...] | None = None
    if config.speculative_token_map is not None:
        found = read_token_map(config.speculative_token_map, target.vocab_size)
        if isinstance(found, Refused):
            return found
        token_map = found
        if draft.hot_tokens and len(found) != draft.draft_vocab_size:
            return Refused(
                "speculative_token_map",
                f"names {len(found)} tokens, but the draft's config.json says hot_vocab_size "
                f"{draft.draft_vocab_size}; give the draft's own map",
            )
        draft = msgspec.structs.replace(draft, draft_vocab_size=len(found), hot_tokens=True)
    elif draft.hot_tokens:
        return Refused(
            "speculative_token_map",
            f"is missing, but the draft's config.json says hot_vocab_size "
            f"{draft.draft_vocab_size}; give the JSON list of their ids",
        )
    shape = resolve_shape(config, spec.name, target.architecture, draft.defaults)
    if isinstance(shape, Refused):
        return shape
    if shape.topk > draft.draft_vocab_size:
        return Refused(
            "speculative_eagle_topk",
            f"{shape.topk} exceeds the {draft.draft_vocab_size} tokens that the draft knows; ask "
            "for no more",
        )
    note = corrected(config, shape)
    return DraftSource(
        folder,
        draft,
        shape,
        load_format,
        stored,
        target.torch_dtype,
        token_map,
        config.speculative_draft_model_quantization == "int8",
        () if note is None else (note,),
    )


def _refuse_survival(config: EngineConfig, spec: DrafterSpec) -> Refused | None:
    """What needs a confidence head, asked of a draft of ``spec`` without one."""
    name = f"this {spec.name} draft (enable_confidence_head: false)"
    without = msgspec.structs.replace(spec, name=name, gives_survival=False)
    return refuse_ragged(config, without) or refuse_survival(config, without)
