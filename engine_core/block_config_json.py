"""The config.json of a block draft, DFLASH's or DSPARK's, in any exporter's format."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from .block_capture import block_capture
from .block_fields import BlockAlgorithm, BlockFields
from .block_heads import confidence_head, confidence_with_markov, markov_head
from .block_layers import block_layers
from .draft_config import BlockConfig, DraftConfig, SpecShape
from .draft_names import our_name
from .drafter_spec import MAX_DRAFT_TOKENS
from .mask_token import mask_token_id
from .model_config import ModelConfig
from .safetensors_header import HeaderError, StoredTensor, tensor_headers

_ARCHITECTURES: dict[BlockAlgorithm, tuple[str, ...]] = {
    "DFLASH": ("DFlashDraftModel", "MuseGlimmerAssistantModel"),
    "DSPARK": ("DSparkDraftModel", "Qwen3DSparkModel", "LingDSparkModel"),
}
_SPECULATORS: dict[BlockAlgorithm, str] = {"DFLASH": "dflash", "DSPARK": "dspark"}
_SELECTOR = "a convolution around its layers and a selector of candidates"
_LATENT = "multi-head latent attention and experts"
# Block drafts that cannot be run, and what they have that is missing here.
_OTHERS = {
    "DFlashLagunaForCausalLM": "gated attention and a norm for each captured layer",
    "DFlash2DraftModel": _SELECTOR,
    "DFlash2BeamDraftModel": _SELECTOR,
    "MiniMaxDFlash2DraftModel": _SELECTOR,
    "LiLiCorrDraftModel": "a corrector over a lattice of candidates",
    "Lfm2DSparkDraftModel": "layers that are no attention",
    "DSparkMiniMaxDraftModel": "layers of its own kind",
    "DeepseekV4ForCausalLM": _LATENT,
    "DeepseekV4ForCausalLMDSpark": _LATENT,
}
_PLAIN = "use a plain DFLASH draft"
_UNSAID: dict[BlockAlgorithm, int] = {"DFLASH": 16, "DSPARK": 7}  # block_size
# What only DFlash2 drafts have, and its value where they do not.
_SELECTOR_FIELDS = {
    "conv_kernel_size": 0,
    "conv_group_size": 0,
    "selector_rank": 0,
    "selector_top_k": 0,
    "output_multiplier": 1,
}


class _Training(msgspec.Struct, frozen=True):
    """What "outrider" says beside the serving shape."""

    trained_length: int | None = None


def parse_block_config(
    text: bytes, path: Path, target: ModelConfig, algorithm: BlockAlgorithm, tokenizer: Path | None
) -> DraftConfig:
    """The draft that ``text``, read from ``path``, describes; tensors beside it are looked at.

    ``tokenizer``: see ``mask_token_id``. Raises ValueError naming the field, ModelConfigError,
    msgspec.MsgspecError.
    """
    fields = BlockFields(text, algorithm)
    _refuse_architecture(fields)
    _refuse_extras(fields)
    if (path.parent / "mask_embedding.pt").is_file():
        raise ValueError(
            "mask_embedding.pt: replaces the mask token's embedding and is a pickle, which can run "
            "code when it is read; use a draft whose mask token has the target's own embedding"
        )
    stored = _stored(path.parent)
    layers = block_layers(fields, target, path)
    model = layers.model
    capture = block_capture(fields, target.num_hidden_layers, model.num_hidden_layers)
    first_row = _first_row(fields)
    size = _block_size(fields)
    drafts = (_UNSAID[algorithm] if size is None else size) - _anchors(fields, first_row)
    if not 1 <= drafts < MAX_DRAFT_TOKENS:
        raise ValueError(
            f"block_size: {size} makes {drafts} drafts, of which a row has 1 to "
            f"{MAX_DRAFT_TOKENS - 1}; use a draft of other blocks"
        )
    shape = SpecShape(drafts, 1, drafts + 1)
    own = fields.find("outrider", SpecShape)
    if own is not None and own != shape:
        raise ValueError(
            f"outrider: {own.steps} steps of topk {own.topk} and {own.num_draft_tokens} draft "
            f"tokens, but its block is {drafts} steps of topk 1 and {drafts + 1}; change block_size"
        )
    markov = None if algorithm == "DFLASH" else markov_head(fields)
    confidence = markov is not None and confidence_head(fields)
    block = BlockConfig(
        drafts=drafts,
        first_row=first_row,
        mask_token_id=mask_token_id(fields, target.vocab_size, tokenizer),
        causal=layers.causal,
        whole_block_window=fields.speculators is not None,
        embed_scale=_scale(fields, "input_embedding_scale"),
        markov=markov,
        confidence=confidence,
        confidence_with_markov=(
            confidence
            and markov is not None
            and confidence_with_markov(fields, markov, model.hidden_size, stored)
        ),
        fc_order=capture.fc_order,
        gemma_norms=bool(fields.find("use_gemma_norm", bool)),
        value_scale=_scale(fields, "attention_value_scale"),
    )
    return DraftConfig(
        algorithm=algorithm,
        model=model,
        feature_layers=capture.layers,
        feature_size=len(capture.layers) * target.hidden_size,
        draft_vocab_size=fields.find("draft_vocab_size", int) or model.vocab_size,
        owns_embedding=False,
        owns_head=False,
        defaults=None if size is None else shape,
        block=block,
        trained_length=_trained_length(fields),
        notes=tuple(_notes(fields, target, drafts, size)),
    )


def _stored(folder: Path) -> dict[str, StoredTensor]:
    """The checkpoint's tensors by our names; empty where there is none that can be read."""
    with contextlib.suppress(HeaderError):  # loading says more of what is wrong
        return {our_name(name): tensor for name, tensor in tensor_headers(folder).items()}
    return {}


def _refuse_architecture(fields: BlockFields) -> None:
    algorithm = fields.algorithm
    if fields.speculators is not None:
        if fields.speculators == _SPECULATORS[algorithm]:
            return
        others = [other for other, name in _SPECULATORS.items() if name == fields.speculators]
        remedy = (
            f"use --speculative-algorithm {others[0]}" if others else "use a dflash or dspark draft"
        )
        raise ValueError(
            f"speculators_model_type: {fields.speculators!r} is no {algorithm} draft; {remedy}"
        )
    names = fields.find("architectures", tuple[str, ...]) or ()
    if len(names) == 1 and names[0] in _ARCHITECTURES[algorithm]:
        return
    for name in names:
        if name in _OTHERS:
            raise ValueError(
                f"architectures: {name} has {_OTHERS[name]}, which cannot be run; use a "
                f"{' or '.join(_ARCHITECTURES[algorithm])}"
            )
    others = [other for other, known in _ARCHITECTURES.items() if names and names[0] in known]
    remedy = f"use --speculative-algorithm {others[0]}, or one of" if others else "use one of"
    raise ValueError(
        f"architectures: {list(names)} is no {algorithm} draft that can be run; {remedy} "
        f"{', '.join(_ARCHITECTURES[algorithm])}"
    )


def _refuse_extras(fields: BlockFields) -> None:
    """Heads and layouts that some drafts of these architectures have."""
    for name, neutral in _SELECTOR_FIELDS.items():
        value = fields.nested(name, float)
        if value is not None and value != neutral:
            raise ValueError(
                f"{name}: {value:g}, of DFlash2's convolution and selector, which cannot be run; "
                f"{_PLAIN}"
            )
    cap = fields.nested("final_logit_softcapping", float) or 0.0
    if cap > 0.0:
        raise ValueError(
            f"final_logit_softcapping: {cap:g}, capped logits, cannot be run; use a draft without"
        )
    projector = fields.find("projector_type", str)
    if projector not in (None, "", "dflash"):
        raise ValueError(
            f"projector_type: {projector!r}, Domino's recurrent head, cannot be run; {_PLAIN}"
        )
    if fields.find("shift_label", bool):
        raise ValueError(f"shift_label: true, Domino's recurrent head, cannot be run; {_PLAIN}")
    if fields.find("has_embed_tokens", bool):
        raise ValueError(
            "has_embed_tokens: true, drafts with an embedding of their own (Nemotron-3.5's layout) "
            "cannot be run; use one that shares the target's"
        )


def _first_row(fields: BlockFields) -> Literal[0, 1]:
    """0 where row k proposes the token behind its own position, 1 where it fills its own in."""
    given = fields.find("sample_from_anchor", bool)
    if fields.algorithm == "DFLASH":
        if given:
            raise ValueError(
                "sample_from_anchor: true, rows that stand for the next token, is how DSPARK "
                "drafts are trained; use a DFLASH draft trained with false"
            )
        return 1
    if given is None and fields.proposed is not None:
        # speculators proposes a block's tokens but the anchor unless that is sampled from, too.
        given = fields.proposed != (fields.find("block_size", int) or 0) - 1
    return 0 if given is None or given else 1


def _anchors(fields: BlockFields, first_row: int) -> int:
    """Rows of a block's size that propose nothing: speculators counts the anchor, serving not."""
    if fields.algorithm == "DFLASH":
        return 1
    return first_row if fields.speculators is not None else 0


def _block_size(fields: BlockFields) -> int | None:
    size = fields.find("block_size", int)
    if size is not None and size < 1:
        raise ValueError(f"block_size: must be 1 or more, is {size}; write the one of training")
    if size is None and fields.speculators is not None:
        raise ValueError("block_size: missing; write the one that the draft was trained with")
    return size


def _trained_length(fields: BlockFields) -> int | None:
    said = fields.find("outrider", _Training)
    if said is None or said.trained_length is None:
        return None
    if said.trained_length < 1:
        raise ValueError(
            f"outrider.trained_length: must be 1 or more, is {said.trained_length}; write the "
            "--sequence-length of training, or leave it out"
        )
    return said.trained_length


def _scale(fields: BlockFields, name: str) -> float:
    value = fields.nested(name, float)
    if value is None:
        return 1.0
    if not 0.0 < value < float("inf"):
        raise ValueError(f"{name}: must be above 0, is {value}; use the one of training")
    return value


def _notes(
    fields: BlockFields, target: ModelConfig, drafts: int, size: int | None
) -> Iterator[str]:
    layers = fields.find("num_target_layers", int)
    if layers is not None and layers != target.num_hidden_layers:
        yield (
            f"num_target_layers: the draft was trained for a target of {layers} layers, this one "
            f"has {target.num_hidden_layers}"
        )
    if size is None:
        yield (
            f"block_size: the draft's config.json has none; {drafts} tokens are drafted unless a "
            "flag says otherwise"
        )
    elif fields.algorithm == "DSPARK" and drafts != size:
        yield (
            f"block_size: {size} counts the anchor, as speculators does; {drafts} tokens are "
            "drafted"
        )
