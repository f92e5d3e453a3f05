"""Masks and positions of rows that are padded on the left."""

import inspect
from typing import Any

import torch


def left_padding(backbone: Any, lengths: torch.Tensor, columns: int) -> dict[str, torch.Tensor]:
    """Return the mask, and positions counted from each row's first token, as in ``generate``.

    Positions are omitted if the backbone doesn't accept them. ``lengths``, (rows,) int64, are the
    rows' numbers of tokens; ``columns`` counts tokens and padding together.
    """
    mask = (torch.arange(columns, device=lengths.device) >= columns - lengths[:, None]).long()
    if "position_ids" not in inspect.signature(backbone.forward).parameters:
        return {"attention_mask": mask}
    return {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
