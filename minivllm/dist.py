"""The ranks that share one model's weights, as an object that layers are given.

A layer whose weight is split over ranks computes a partial sum and calls `group.all_reduce`; that
call is all it knows of parallelism. So a forward has no branch on the number of ranks, and shards
of a model can be built side by side in one process by handing each its own group.

    column split (qkv, gate_up) ──> row split (o, down) ──> group.all_reduce ──> residual

Invariant: layers never ask `torch.distributed` for a rank or a size. The group of one rank, the
identity, is the only one so far.
"""

from __future__ import annotations

import torch


class Group:
    """The group of one rank: every collective is the identity."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `x`.

        Shapes: x [...]; out the same
        """
        return x
