"""What a draft's config.json says beyond a decoder's, and the decoder that its layers are."""

import msgspec

from .draft_config import DraftAlgorithm, SpecShape

# Draft architectures and the decoder that their layers are.
_BASES: dict[DraftAlgorithm, dict[str, str]] = {
    "EAGLE": {
        "LlamaForCausalLMEagle": "LlamaForCausalLM",
        "EagleLlamaForCausalLM": "LlamaForCausalLM",
        "LlamaForCausalLM": "LlamaForCausalLM",  # the repositories of EAGLE's authors
        "Qwen2ForCausalLMEagle": "Qwen2ForCausalLM",
        "Qwen2ForCausalLM": "Qwen2ForCausalLM",
    },
    "EAGLE3": {
        "LlamaForCausalLMEagle3": "LlamaForCausalLM",
        "Eagle3LlamaForCausalLM": "LlamaForCausalLM",
        "LlamaForCausalLM": "LlamaForCausalLM",  # the repositories of EAGLE's authors
    },
}
# Types of drafts and of their layers in the format of speculators.
_SPECULATORS: dict[DraftAlgorithm, str] = {"EAGLE": "eagle", "EAGLE3": "eagle3"}
_LAYER_TYPES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_LATENT = ("kv_lora_rank", "q_lora_rank")


class EagleConfig(msgspec.Struct, frozen=True):
    """``eagle_config``, as SGLang reads it."""

    use_aux_hidden_state: bool = True
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None
    norm_before_fc: bool | None = None


class _Proposal(msgspec.Struct, frozen=True):
    proposal_type: str | None = None
    speculative_tokens: int | None = None


class SpeculatorsConfig(msgspec.Struct, frozen=True):
    """``speculators_config``: how its trainer would serve a draft."""

    default_proposal_method: str | None = None
    proposal_methods: tuple[_Proposal, ...] = ()

    def proposed_tokens(self) -> int | None:
        """Drafts a round of the proposal that is the default."""
        if not self.proposal_methods:
            return None
        named = self.default_proposal_method
        methods = self.proposal_methods
        chosen = next((m for m in methods if m.proposal_type == named), methods[0])
        return chosen.speculative_tokens


class DraftFields(msgspec.Struct, frozen=True):
    """The fields that make a draft, by the names of all formats; null counts as unsaid.

    ``norm_output`` has SGLang's meaning: the recurrent state is the normed one. (SpecForge before
    September 2026 wrote true for drafts whose recurrent state is not: set it to false for those.)
    """

    architectures: tuple[str, ...] | None = None
    model_type: str | None = None
    hot_vocab_size: int | None = None
    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    num_aux_hidden_states: int | None = None
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None
    eagle_config: EagleConfig = EagleConfig()
    norm_before_fc: bool | None = None
    norm_before_residual: bool | None = None
    fc_norm: bool | None = None
    use_aux_norm: bool | None = None
    norm_output: bool | None = None
    bias: bool | None = None
    qkv_bias: bool | None = None
    fusion_bias: bool | None = None
    layernorms: bool | None = None
    embed_requires_grad: bool | None = None
    use_sliding_window: bool | None = None
    speculators_model_type: str | None = None
    speculators_config: SpeculatorsConfig | None = None
    outrider: SpecShape | None = None

    def proposed_chain(self) -> SpecShape | None:
        """The chain that ``speculators_config`` proposes, if it does."""
        said = self.speculators_config
        steps = None if said is None else said.proposed_tokens()
        return None if steps is None else SpecShape(steps, 1, steps + 1)


def decode_fields(text: bytes) -> DraftFields:
    """The fields of a config.json. Raises msgspec.MsgspecError, ValueError."""
    raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    said = {name: value for name, value in raw.items() if bytes(value) != b"null"}
    return msgspec.json.decode(msgspec.json.encode(said), type=DraftFields)


def layers_json(text: bytes, fields: DraftFields, algorithm: DraftAlgorithm) -> bytes:
    """The config.json of the decoder that the draft's layers are. Raises ValueError."""
    raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    if fields.speculators_model_type is not None:
        if fields.speculators_model_type != _SPECULATORS[algorithm]:
            raise ValueError(
                f"speculators_model_type: {fields.speculators_model_type!r} is no {algorithm} "
                f"draft; --speculative-algorithm must be the one that it was trained for"
            )
        outer, raw = raw, _layer_config(raw)
        if "quantization_config" in outer:
            raw["quantization_config"] = outer["quantization_config"]
        kind = msgspec.json.decode(raw.get("model_type", b'"llama"'), type=str)
        base = _LAYER_TYPES.get(kind)
        if base is None:
            raise ValueError(
                f"transformer_layer_config.model_type: {kind!r} is not supported; use a draft with "
                f"layers of {', '.join(_LAYER_TYPES)}"
            )
    else:
        base = None
    for name in _LATENT:
        if bytes(raw.get(name, b"null")) != b"null":
            raise ValueError(
                f"{name}: drafts with multi-head latent attention cannot be run; use one whose "
                "layers are Llama's"
            )
    if fields.use_sliding_window:
        raise ValueError(
            "use_sliding_window: drafts with sliding windows cannot be run; use one with full "
            "attention"
        )
    if fields.model_type == "llama4_text" and "intermediate_size_mlp" in raw:
        raw["intermediate_size"] = raw["intermediate_size_mlp"]
    base = base or _base(fields, algorithm)
    raw["architectures"] = msgspec.Raw(msgspec.json.encode([base]))
    return msgspec.json.encode(raw)


def _layer_config(raw: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    if "transformer_layer_config" not in raw:
        raise ValueError(
            "transformer_layer_config: missing beside speculators_model_type; write the layers' "
            "fields there"
        )
    return msgspec.json.decode(raw["transformer_layer_config"], type=dict[str, msgspec.Raw])


def _base(fields: DraftFields, algorithm: DraftAlgorithm) -> str:
    names = fields.architectures or ()
    bases = _BASES[algorithm]
    if len(names) == 1 and names[0] in bases:
        return bases[names[0]]
    others = [other for other, known in _BASES.items() if names and names[0] in known]
    remedy = f"use --speculative-algorithm {others[0]}, or one of" if others else "use one of"
    raise ValueError(
        f"architectures: {list(names)} is no {algorithm} draft that can be run; {remedy} "
        f"{', '.join(bases)}"
    )
