"""What a draft model with weights is: its layers, what it takes of the target, what it shares."""

from typing import Literal

import msgspec

from .model_config import ModelConfig

DraftAlgorithm = Literal["STANDALONE", "EAGLE", "EAGLE3", "DFLASH", "DSPARK"]
MarkovKind = Literal["vanilla", "gated", "rnn"]


class SpecShape(msgspec.Struct, frozen=True):
    """How much is drafted a round: S ``steps``, K ``topk`` branches, D ``num_draft_tokens``.

    D counts the nodes of a verify row, the bonus token included; a chain (K = 1) has D = S + 1.
    """

    steps: int
    topk: int
    num_draft_tokens: int


class MarkovConfig(msgspec.Struct, frozen=True):
    """DSPARK's head between the tokens of a block (block_drafts.md 2.5), of ``rank`` r."""

    kind: MarkovKind
    rank: int


class BlockConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a block draft has beyond its layers (block_drafts.md 1 and 2): DFLASH's or DSPARK's.

    One forward over [bonus token, mask, ...] proposes ``drafts`` tokens: B - 1 for DFLASH's block
    size B, gamma for DSPARK's. ``first_row``: the row that proposes the first of them. 1: row i
    stands for the token at its own position, and row 0 proposes nothing; 0: row k stands for the
    token at the position behind its own. ``causal``: by layer, whether a block's rows see none of
    those behind themselves. ``whole_block_window``: in sliding layers all rows of a block see all
    of it, or what ``causal`` leaves, and as many tokens as the window has in front of its first
    row, as in speculators' training; else every row has a window of its own. ``embed_scale``: of
    the target's embeddings. ``markov`` and ``confidence``: DSPARK's heads;
    ``confidence_with_markov``: the latter reads the embedding of the token before, too.

    What only reading the weights minds (``engine/models/block_checkpoint.py``): ``fc_order``, for
    each block of columns of the checkpoint's ``fc`` the place in ``feature_layers`` of the layer
    that it takes; ``gemma_norms``: norms are stored less one; ``value_scale``: of all values.
    """

    drafts: int
    first_row: Literal[0, 1]
    mask_token_id: int
    causal: tuple[bool, ...]
    whole_block_window: bool = False
    embed_scale: float = 1.0
    markov: MarkovConfig | None = None
    confidence: bool = False
    confidence_with_markov: bool = False
    fc_order: tuple[int, ...] = ()
    gemma_norms: bool = False
    value_scale: float = 1.0

    @property
    def rows(self) -> int:
        """Query rows of a block's forward."""
        return self.drafts + self.first_row


class DraftConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A draft model (eagle_family.md 2.1 and 2.2), whatever format its config.json has.

    ``model``: the draft's own layers as a dense decoder, with hidden size H and the target's
    vocabulary. ``feature_layers``: the target's layers whose entering streams it takes, side by
    side; empty for the target's final hidden state. ``feature_size`` W: width of these features of
    a position, 0 for a draft that takes none (STANDALONE). ``draft_vocab_size`` Vd: rows of its
    head. ``owns_embedding``, ``owns_head``: else the target's are used. ``hot_tokens``: the head is
    rows of the target's (EAGLE with a token map). ``has_fc``: whether features and state need
    ``fc`` to become one; ``norm_before_fc``, ``chunk_norms``: norms of all features at once, or of
    each layer's, in front of it. ``norm_output``: the recurrent state is the normed one that the
    head reads. ``norm_before_residual``: an EAGLE3 draft's first layer adds to its input behind
    the norm. ``first_layer_norm``: an EAGLE draft's first layer has an input norm.
    ``defaults``: the draft's best serving shape. ``block``: of DFLASH's and DSPARK's drafts.
    ``trained_length``: tokens of the texts that it was trained on, where it says so. ``notes``:
    what whoever serves it should be told.
    """

    algorithm: DraftAlgorithm
    model: ModelConfig
    feature_layers: tuple[int, ...] = ()
    feature_size: int = 0
    draft_vocab_size: int
    owns_embedding: bool
    owns_head: bool
    hot_tokens: bool = False
    has_fc: bool = True
    fc_bias: bool = False
    norm_before_fc: bool = False
    chunk_norms: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    first_layer_norm: bool = False
    defaults: SpecShape | None = None
    block: BlockConfig | None = None
    trained_length: int | None = None
    notes: tuple[str, ...] = ()
