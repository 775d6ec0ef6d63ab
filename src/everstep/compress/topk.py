"""TopK: the largest elements of each gradient."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.futures import Future

from everstep.compress.compressor import Compressor, gathered
from everstep.errors import UsageError
from everstep.payloads import Kept


class TopK(Compressor[Kept]):
    """Keeps the share `ratio` of each gradient's elements that is largest in magnitude (at least one).

    With error feedback what is left out is added to the gradient of the next step. Between ranks the kept elements of all
    are summed; the frame has each of those once.
    """

    def __init__(self, ratio: float, *, error_feedback: bool = True, residual: str = "base") -> None:
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
            raise UsageError(f"ratio must be above 0 and at most 1, not {ratio!r}")
        super().__init__(error_feedback=error_feedback, residual=residual)
        self.ratio = float(ratio)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "ratio": self.ratio}

    def takes(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point and dtype.itemsize >= 2

    def compress(self, flat: torch.Tensor, seed: int) -> Kept:
        count = min(flat.numel(), max(1, math.ceil(self.ratio * flat.numel())))
        indices = torch.topk(flat.abs(), count, sorted=False).indices.sort().values
        return Kept(indices, flat[indices], flat.numel())

    def write(self, payload: Kept, out: torch.Tensor) -> None:
        out.zero_()
        out[payload.indices] = payload.values

    def exchange(
        self, mine: list[Kept], odd: list[bool], seeds: list[int], group: Any
    ) -> Future[tuple[list[Kept], list[bool]]]:
        numels, counts = [k.numel for k in mine], [k.indices.numel() for k in mine]
        dtype = mine[0].dtype
        values = torch.cat([k.values for k in mine]).view(torch.uint8)
        message = torch.cat([values, torch.cat([k.indices.to(torch.int32) for k in mine]).view(torch.uint8)])

        def merge(messages: list[torch.Tensor]) -> list[Kept]:
            at = values.numel()
            per_rank = [
                (torch.split(m[at:].clone().view(torch.int32).long(), counts), torch.split(m[:at].view(dtype), counts))
                for m in messages
            ]
            return [
                _mean([i[at] for i, _ in per_rank], [v[at] for _, v in per_rank], numels[at]) for at in range(len(numels))
            ]

        return gathered(message, odd, group, merge)


def _mean(indices: list[torch.Tensor], values: list[torch.Tensor], numel: int) -> Kept:
    """Summed in the order of the ranks, so that all get the same bits, and divided first, so that none is out of range."""
    union, places = torch.unique(torch.cat(indices), return_inverse=True)
    total = torch.zeros(union.numel(), dtype=torch.float64, device=values[0].device)
    for place, value in zip(torch.split(places, [i.numel() for i in indices]), values, strict=True):
        total[place] += value.double() / len(values)
    largest = torch.finfo(values[0].dtype).max
    return Kept(union, total.clamp_(-largest, largest).to(values[0].dtype), numel)
