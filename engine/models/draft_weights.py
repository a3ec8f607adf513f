"""The weights of EAGLE's drafts, and the names that trainers give them."""

from dataclasses import dataclass, field

import torch

from ...engine_core.draft_config import DraftConfig
from ...engine_core.draft_names import our_name
from ..weights import Checkpoint, TensorSource, WeightsError
from .decoder_weights import LayerBody, read_body


@dataclass(slots=True)
class DraftLayer:
    """One layer; ``norm`` is what the stream passes on its way into attention, if anything.

    ``embed_norm``: that of the token's embedding, which stands before the stream's part in what
    attention takes in; None for layers that take in the stream alone.
    """

    body: LayerBody
    norm: torch.Tensor | None
    embed_norm: torch.Tensor | None


@dataclass(slots=True)
class DraftWeights:
    """Matrices are [out, in], in the checkpoint's dtype; None for what the draft does not have.

    ``embed`` [V, H] and ``head`` [Vd, H] are its own, else the target's are used; ``token_ids``
    int64[Vd] are the target's ids of draft ids, None where the two are the same. ``chunk_norms``
    [Ht] each, one for a feature layer; ``fc_input_norm`` [W] is that of all features at once.
    """

    embed: torch.Tensor | None
    head: torch.Tensor | None
    token_ids: torch.Tensor | None
    fc: torch.Tensor | None
    fc_bias: torch.Tensor | None
    fc_input_norm: torch.Tensor | None
    chunk_norms: list[torch.Tensor]
    final_norm: torch.Tensor | None
    layers: list[DraftLayer] = field(default_factory=list)

    def tensors(self) -> list[torch.Tensor]:
        """All that exist, without ``token_ids``."""
        some = [self.embed, self.head, self.fc, self.fc_bias, self.fc_input_norm, self.final_norm]
        some += self.chunk_norms
        for layer in self.layers:
            some += [*layer.body.tensors(), layer.norm, layer.embed_norm]
        return [tensor for tensor in some if tensor is not None]


class DraftTensors:
    """A checkpoint's tensors by the names of our decoder: ``model.layers.0.…``, ``model.fc.…``."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._actual: dict[str, str] = {}
        for name in checkpoint.names:
            ours = our_name(name)
            if ours in self._actual:
                raise WeightsError(f"tensors {self._actual[ours]!r} and {name!r} are the same one")
            self._actual[ours] = name

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds our ``name``."""
        return name in self._actual

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor of our ``name``; see ``Checkpoint.take``."""
        return self._checkpoint.take(self._actual.get(name, name), shape)

    def take_any(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor of our ``name`` in any type; see ``Checkpoint.take_any``."""
        return self._checkpoint.take_any(self._actual.get(name, name), shape)

    def finish(self, ignorable: tuple[str, ...]) -> None:
        """Raise if a tensor was never taken; names ending in one of ``ignorable`` may be left."""
        # A later layer of an EAGLE3 draft may have two norms, of which one is used.
        spare = [
            actual
            for name, actual in self._actual.items()
            if name.endswith("input_layernorm.weight")
            and name.replace("input_layernorm", "hidden_norm") in self._actual
        ]
        self._checkpoint.finish((*ignorable, *spare))


def read_draft(source: TensorSource, config: DraftConfig) -> DraftWeights:
    """The weights of an EAGLE or EAGLE3 draft, without its token ids."""
    model = config.model
    hidden = model.hidden_size

    def norm(name: str, size: int) -> torch.Tensor:
        return source.take(f"model.{name}.weight", (size,))

    fused = config.feature_size if config.algorithm == "EAGLE3" else hidden + config.feature_size
    chunks = max(len(config.feature_layers), 1)
    weights = DraftWeights(
        embed=source.take("model.embed_tokens.weight", (model.vocab_size, hidden))
        if config.owns_embedding
        else None,
        head=source.take("lm_head.weight", (config.draft_vocab_size, hidden))
        if config.owns_head
        else None,
        token_ids=None,
        fc=source.take("model.fc.weight", (hidden, fused)) if config.has_fc else None,
        fc_bias=source.take("model.fc.bias", (hidden,)) if config.fc_bias else None,
        fc_input_norm=norm("input_norm", config.feature_size) if config.norm_before_fc else None,
        chunk_norms=[norm(f"fc_norm.{i}", config.feature_size // chunks) for i in range(chunks)]
        if config.chunk_norms
        else [],
        final_norm=norm("norm", hidden) if config.algorithm == "EAGLE3" else None,
    )
    for index in range(model.num_hidden_layers):
        weights.layers.append(_read_layer(source, config, index))
    return weights


def _read_layer(source: TensorSource, config: DraftConfig, index: int) -> DraftLayer:
    hidden = config.model.hidden_size
    prefix = f"model.layers.{index}."
    if config.algorithm == "EAGLE3" and index == 0:
        return DraftLayer(
            body=read_body(source, config.model, index, 2 * hidden),
            norm=source.take(f"{prefix}hidden_norm.weight", (hidden,)),
            embed_norm=source.take(f"{prefix}input_layernorm.weight", (hidden,)),
        )
    norm = None
    if index or config.first_layer_norm:
        # Later layers of EAGLE3 drafts have either, and where they have both this one is used.
        name = f"{prefix}hidden_norm.weight"
        if not source.has(name):
            name = f"{prefix}input_layernorm.weight"
        norm = source.take(name, (hidden,))
    return DraftLayer(read_body(source, config.model, index, hidden), norm, None)


def read_token_ids(tensors: DraftTensors, config: DraftConfig) -> torch.Tensor | None:
    """int64[Vd]: the target's id of each draft id, None where all are the same.

    Raises WeightsError if there is no map though the vocabularies differ, or if its offsets
    ("d2t") do not name different tokens, or not those of the mask ("t2d").
    """
    size, vocab = config.draft_vocab_size, config.model.vocab_size
    if not tensors.has("d2t"):
        if size != vocab:
            raise WeightsError(
                f"the checkpoint lacks tensor 'd2t' [{size}], which says of which of the target's "
                f"{vocab} tokens the draft's are"
            )
        return None
    offsets = tensors.take_any("d2t", (size,))
    if offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise WeightsError(f"tensor 'd2t' is {offsets.dtype}; it must hold whole numbers")
    ids = torch.arange(size) + offsets.long()
    meaning = "it must hold offsets, so that draft id i is token i + d2t[i]"
    outside = ids[(ids < 0) | (ids >= vocab)]
    if len(outside):
        raise WeightsError(
            f"tensor 'd2t': names token {int(outside[0])}, which is outside the target's "
            f"vocabulary of {vocab}; {meaning}"
        )
    if int(torch.bincount(ids).max()) > 1:
        raise WeightsError(f"tensor 'd2t': two draft ids are the same token; {meaning}")
    if tensors.has("t2d"):
        mask = tensors.take_any("t2d", (vocab,)) != 0
        expected = torch.zeros(vocab, dtype=torch.bool)
        expected[ids] = True
        if not torch.equal(mask, expected):
            raise WeightsError(
                f"tensors 'd2t' and 't2d' disagree on {int((mask != expected).sum())} tokens; "
                "they are not of one training run"
            )
    return None if size == vocab and bool((offsets == 0).all()) else ids


def spread_token_ids(config: DraftConfig) -> torch.Tensor | None:
    """Ids in place of ``read_token_ids`` where there is no checkpoint: spread over all tokens."""
    size, vocab = config.draft_vocab_size, config.model.vocab_size
    return None if size == vocab else torch.arange(size) * vocab // size
