"""What a collective sends."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["payload_bytes"]


def payload_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that the tensors hold; of a sparse one its indices and values."""
    return sum(t._indices().nbytes + t._values().nbytes if t.is_sparse else t.nbytes for t in tensors)
