"""Log-probabilities of emitted tokens, of the raw model distribution."""

import numpy as np
import torch

from ...engine_core.ids import I32
from ...engine_core.plan import RowLogprobs, TokenLogprobs
from .features import Feature
from .slot_table import SlotTable


def collect_logprobs(
    logits: torch.Tensor,
    slots: I32,
    node_cu: I32,
    accept_cu: I32,
    accept_idx: I32,
    emitted: I32,
    table: SlotTable,
) -> tuple[RowLogprobs, ...]:
    """Entries for the rows that asked for them and emitted something.

    ``logits`` float32[N, V] before any processor. The int32 arrays are the step's: ``slots`` [R],
    ``node_cu`` and ``accept_cu`` [R + 1], ``accept_idx`` and ``emitted`` [A].
    """
    wants = (table.features[slots] & int(Feature.LOGPROBS)) != 0
    rows = np.flatnonzero(wants & (np.diff(accept_cu) > 0)).tolist()
    return tuple(
        RowLogprobs(
            row,
            _row(
                logits,
                node_cu[row] + accept_idx[accept_cu[row] : accept_cu[row + 1]],
                emitted[accept_cu[row] : accept_cu[row + 1]],
                table.logprobs[int(slots[row])],
            ),
        )
        for row in rows
    )


def _row(logits: torch.Tensor, nodes: I32, tokens: I32, top: int) -> tuple[TokenLogprobs, ...]:
    index = torch.from_numpy(nodes.astype(np.int64)).to(logits.device)
    chosen = torch.from_numpy(tokens.astype(np.int64)).to(logits.device)
    values = torch.log_softmax(logits[index], dim=1)
    of_chosen = values.gather(1, chosen[:, None])[:, 0].tolist()
    best, ids = torch.topk(values, min(top, values.shape[1]), dim=1)
    best_rows, id_rows = best.cpu().numpy(), ids.int().cpu().numpy()
    return tuple(
        TokenLogprobs(token, of_chosen[i], id_rows[i].tobytes(), best_rows[i].tobytes())
        for i, token in enumerate(tokens.tolist())
    )
