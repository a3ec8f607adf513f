"""EAGLE's and EAGLE3's networks on native CPU kernels, in float32."""

import numpy as np
import torch
from numpy.typing import NDArray

from ...engine_core.draft_config import DraftConfig
from ...kernels.draft_chains_cpu import CpuChains
from ...kernels.draft_cpu import CpuDraft
from ...kernels.matrices_cpu import Arena, PackedMatrix, linear, rms_norm, rms_norm_chunks
from ..forward_batch import ForwardBatch
from ..kv_pool import KVPool
from ..rotary import RotaryTable
from .cpu_arrays import (
    InstructionSet,
    Rows,
    SeenArrays,
    array_of,
    bits,
    body_bytes,
    floats,
    item_bytes,
    pack,
    pack_body,
    packed_bytes,
    table_array,
)
from .cpu_decoder import NativeDecoder
from .draft_net import AcceptedRows, ChainRows, ChainState, DraftHidden
from .draft_weights import DraftLayer, DraftWeights
from .model import TargetModel


class NativeDraft:
    """As `torch_draft.TorchDraft`, a pass being one native call.

    bfloat16 weights stay bfloat16 in memory. With ``int8`` the matrices of the layers and the head
    are 8-bit integers with a scale of each output, the head also where it is the target's: a pass
    reads half the bytes, and drafts may differ from those of the weights as they are.

    Results are bit-identical for every batch shape. A result's memory is its own only until the
    next call of the same method; ``forward`` may take its own last answer.
    """

    def __init__(
        self,
        weights: DraftWeights,
        config: DraftConfig,
        target: TargetModel,
        isa: InstructionSet | None = None,
        int8: bool = False,
    ) -> None:
        model = config.model
        self._config = config
        self._target = target
        self._isa: InstructionSet | None = isa
        self._token_ids = weights.token_ids
        if config.hot_tokens and weights.token_ids is not None:
            weights.head = target.output_head[weights.token_ids]
        if int8 and weights.head is None:
            weights.head = target.output_head
        self._rotary = RotaryTable(
            model.rope, model.head_dim, model.context_length, torch.device("cpu")
        )
        self._layers = CpuDraft(
            hidden_size=model.hidden_size,
            intermediate_size=model.intermediate_size,
            num_heads=model.num_attention_heads,
            num_kv_heads=model.num_key_value_heads,
            head_dim=model.head_dim,
            num_layers=model.num_hidden_layers,
            eps=model.rms_norm_eps,
            isa=isa,
        )
        self._seen = SeenArrays()
        self._int8 = int8
        self._arena = Arena(_arena_bytes(weights, config, int8))
        self._weight_bytes = 0
        for index, layer in enumerate(weights.layers):
            self._install(index, layer)
        self._fc = self._packed(weights.fc, weights.fc_bias, False)
        self._head = self._packed(weights.head, None, int8)
        embed = bits(target.embedding if weights.embed is None else weights.embed)
        self._weight_bytes += 0 if weights.embed is None else embed.nbytes
        is_eagle = config.algorithm == "EAGLE"
        final_norm = floats(weights.final_norm)
        self._layers.set_ends(
            embed=embed, fuse=self._fc if is_eagle else None, final_norm=final_norm
        )
        self._fc_input_norm = floats(weights.fc_input_norm)
        norms = [array_of(norm) for norm in weights.chunk_norms]
        self._chunk_norms = np.stack(norms) if norms else None
        self._has_norm = final_norm is not None
        self._norm_output = self._has_norm and config.norm_output
        head = self._head or packed_head(target)
        ids = None if weights.token_ids is None else weights.token_ids.numpy()
        self._chains = CpuChains(
            self._layers,
            head,
            ids,
            self._norm_output,
            fc=None if is_eagle else self._fc,
            input_norm=None if is_eagle else self._fc_input_norm,
            chunk_norms=None if is_eagle else self._chunk_norms,
        )
        self._recurrent, self._normed = Rows(model.hidden_size), Rows(model.hidden_size)
        self._fused, self._logits = Rows(model.hidden_size), Rows(config.draft_vocab_size)

    @property
    def config(self) -> DraftConfig:
        """What it is."""
        return self._config

    @property
    def weight_bytes(self) -> int:
        """Bytes of its own weights in memory."""
        return self._weight_bytes

    @property
    def dtype(self) -> torch.dtype:
        """Computation dtype."""
        return torch.float32

    @property
    def token_ids(self) -> torch.Tensor | None:
        """int64[Vd]: the target's id of each draft id."""
        return self._token_ids

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, H] of the target's features [T, W]; EAGLE takes them as they are."""
        if self._config.algorithm == "EAGLE" or self._fc is None or not len(features):
            return features
        x = self._normed_features(features.contiguous().numpy())
        out = self._fused.take(len(x))
        linear(x, self._fc, out.numpy(), isa=self._isa)
        return out

    def forward(self, batch: ForwardBatch, hidden: torch.Tensor | None, kv: KVPool) -> DraftHidden:
        """One pass of ``batch`` with ``hidden`` [T, H]."""
        if hidden is None:
            raise ValueError("hidden: this draft needs the target's features or its own states")
        positions = batch.positions.numpy()
        rotary, tokens = self._rotary, positions.shape[0]
        rotary.reserve(int(positions.max()) + 1)
        normed = self._normed.take(tokens) if self._has_norm else None
        recurrent = None if self._norm_output else self._recurrent.take(tokens)
        self._layers.forward(
            batch.input_ids.numpy(),
            positions,
            batch.kv_slots.numpy(),
            batch.cu_q.numpy(),
            batch.kv_lens.numpy(),
            batch.page_table.numpy(),
            batch.tree_bits.numpy(),
            batch.is_tree.numpy(),
            kv.data.numpy(),
            kv.page_size,
            rotary.cos.numpy(),
            rotary.sin.numpy(),
            hidden.numpy(),
            None if recurrent is None else recurrent.numpy(),
            None if normed is None else normed.numpy(),
            batch.logits_index.numpy(),
        )
        if normed is None:
            assert recurrent is not None
            return DraftHidden(recurrent, recurrent)
        return DraftHidden(normed if recurrent is None else recurrent, normed)

    def logits(self, head_input: torch.Tensor) -> torch.Tensor:
        """float32[N, Vd] logits of rows [N, H]."""
        if self._head is None:
            return self._target.logits(head_input)
        out = self._logits.take(head_input.shape[0])
        linear(head_input.numpy(), self._head, out.numpy(), isa=self._isa)
        return out

    def draft(self, rows: ChainRows, state: ChainState, kv: KVPool, levels: int) -> None:
        """As ``ChainDraftNet.draft``, in one native call."""
        of, rotary = self._seen.of, self._rotary
        slots, seq_lens = of(rows.slots), of(rows.seq_lens)
        if not len(slots):
            return
        rotary.reserve(int(seq_lens[slots].max()) + levels - 1)
        self._chains.draft(
            slots,
            of(rows.caps),
            seq_lens,
            of(rows.page_table),
            of(state.first),
            of(state.hidden),
            of(kv.data),
            kv.page_size,
            of(rotary.cos),
            of(rotary.sin),
            levels,
            of(rows.cu_q),
            of(rows.tokens),
            of(rows.parents),
            of(rows.proposed),
            of(rows.depths),
        )

    def follow(self, rows: AcceptedRows, state: ChainState, kv: KVPool) -> None:
        """As ``ChainDraftNet.follow``, in one native call."""
        of, batch, rotary = self._seen.of, rows.batch, self._rotary
        kv_lens = of(batch.kv_lens)
        rotary.reserve(min(int(kv_lens.max()), self._config.model.context_length))
        self._chains.follow(
            of(rows.slots),
            of(rows.kinds).astype(np.uint8, copy=False),  # int32 in steps on a GPU
            of(rows.starts),
            of(rows.accept_lens),
            of(rows.tokens),
            of(rows.path),
            of(batch.input_ids),
            of(batch.kv_slots),
            of(batch.cu_q),
            kv_lens,
            table_array(batch, self._seen),
            of(rows.prompts),
            of(rows.features),
            of(kv.data),
            kv.page_size,
            of(rotary.cos),
            of(rotary.sin),
            of(state.first),
            of(state.hidden),
        )

    def _normed_features(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        eps = self._config.model.rms_norm_eps
        for norm, apply in (
            (self._fc_input_norm, rms_norm),
            (self._chunk_norms, rms_norm_chunks),
        ):
            if norm is not None:
                source, x = x, np.empty_like(x)
                apply(source, norm, eps, x, isa=self._isa)
        return x

    def _install(self, index: int, layer: DraftLayer) -> None:
        body = layer.body
        packed = pack_body(body, self._arena, self._int8)
        self._layers.set_layer(
            index,
            input_norm=floats(layer.norm),
            embed_norm=floats(layer.embed_norm),
            norm_residual=self._config.norm_before_residual,
            qkv=packed.qkv,
            q_norm=floats(body.q_norm),
            k_norm=floats(body.k_norm),
            o=packed.o,
            post_norm=array_of(body.post_norm),
            gate_up=packed.gate_up,
            down=packed.down,
            window=self._config.model.sliding_windows[index],
        )
        self._weight_bytes += packed.nbytes

    def _packed(
        self, weight: torch.Tensor | None, bias: torch.Tensor | None, int8: bool
    ) -> PackedMatrix | None:
        if weight is None:
            return None
        matrix = pack(weight, bias, self._arena, int8)
        self._weight_bytes += matrix.nbytes
        return matrix


def packed_head(target: TargetModel) -> PackedMatrix:
    """The target's output head for kernels, its own where it has one."""
    if isinstance(target, NativeDecoder):
        return target.packed_head
    return PackedMatrix(bits(target.output_head))


def _arena_bytes(weights: DraftWeights, config: DraftConfig, int8: bool) -> int:
    """Bytes of all packed matrices."""
    total = 0
    for layer in weights.layers:
        item = 1 if int8 else item_bytes(layer.body.qkv)
        total += body_bytes(config.model, layer.body.qkv.shape[1], item)
    for matrix, rounded in ((weights.fc, False), (weights.head, int8)):
        if matrix is not None:
            item = 1 if rounded else item_bytes(matrix)
            total += packed_bytes(matrix.shape[0], matrix.shape[1], item)
    return total
