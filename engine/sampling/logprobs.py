"""Log-probabilities of tokens, of the raw model distribution."""

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

    def nodes(row: int) -> torch.Tensor:
        index = node_cu[row] + accept_idx[accept_cu[row] : accept_cu[row + 1]]
        return torch.from_numpy(index.astype(np.int64)).to(logits.device)

    return tuple(
        RowLogprobs(
            row,
            token_logprobs(
                logits[nodes(row)],
                emitted[accept_cu[row] : accept_cu[row + 1]],
                table.logprobs[int(slots[row])],
            ),
        )
        for row in rows
    )


def token_logprobs(logits: torch.Tensor, tokens: I32, top: int) -> tuple[TokenLogprobs, ...]:
    """Entries of ``tokens`` int32[n] by ``logits`` float32[n, V], with the ``top`` best of each."""
    chosen = torch.from_numpy(tokens.astype(np.int64)).to(logits.device)
    values = torch.log_softmax(logits, dim=1)
    of_chosen = values.gather(1, chosen[:, None])
    ranks = (values > of_chosen).sum(dim=1).tolist()
    best, ids = torch.topk(values, min(top, values.shape[1]), dim=1)
    best_rows, id_rows = best.cpu().numpy(), ids.int().cpu().numpy()
    return tuple(
        TokenLogprobs(token, value, id_rows[i].tobytes(), best_rows[i].tobytes(), 1 + ranks[i])
        for i, (token, value) in enumerate(
            zip(tokens.tolist(), of_chosen[:, 0].tolist(), strict=True)
        )
    )
