"""Quantize: small integers, and a scale for each block of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.futures import Future

from everstep.compress.compressor import Compressor, gathered
from everstep.errors import UsageError
from everstep.payloads import Codes

BLOCK = 256
ROUNDINGS = ("nearest", "stochastic")
_LARGEST = torch.finfo(torch.float32).max


class Quantize(Compressor[Codes]):
    """Keeps each element as one of 2^bits - 1 multiples of its block's scale. Blocks are of 256 elements.

    Rounding is to the nearest, or stochastic: up or down at random so that the mean is right, by numbers that depend on
    nothing but `seed`, step, parameter and rank. The mean over ranks is quantised again, alike on all of them.
    """

    def __init__(
        self, bits: int = 8, *, rounding: str = "nearest", seed: int = 0, error_feedback: bool = False,
        residual: str = "base",
    ) -> None:  # fmt: skip
        if bits not in (4, 8) or isinstance(bits, bool):
            raise UsageError(f"bits must be 4 or 8, not {bits!r}")
        if rounding not in ROUNDINGS:
            raise UsageError(f"rounding must be one of {', '.join(ROUNDINGS)}, not {rounding!r}")
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 1 << 62:
            raise UsageError(f"seed must be an integer from 0 to 2^62, not {seed!r}")
        super().__init__(error_feedback=error_feedback, residual=residual)
        self.bits = bits
        self.rounding = rounding
        self.seed = seed

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "bits": self.bits, "rounding": self.rounding, "seed": self.seed}

    def compress(self, flat: torch.Tensor, seed: int) -> Codes:
        top = (1 << (self.bits - 1)) - 1
        rows = F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
        scales = _rounded_up(rows.abs().amax(dim=1) / top)
        wide = scales.float().unsqueeze(1)
        quotients = torch.where(wide > 0, rows / wide, 0.0)
        if self.rounding == "stochastic":
            generator = torch.Generator(flat.device).manual_seed((seed ^ self.seed) & ((1 << 63) - 1))
            quotients += torch.rand(quotients.shape, generator=generator, device=flat.device)
            quotients.floor_()
        else:
            quotients.round_()
        # A scale that was rounded up, times the largest code, may be more than float32 has.
        limits = torch.floor(_LARGEST / wide).clamp_(max=top)
        codes = torch.clamp(quotients, -limits, limits).to(torch.int8).view(-1)[: flat.numel()]
        return Codes(scales, codes, BLOCK, self.bits)

    def write(self, payload: Codes, out: torch.Tensor) -> None:
        rows = F.pad(payload.codes, (0, -out.numel() % BLOCK)).view(-1, BLOCK)
        out.copy_((rows * payload.scales.float().unsqueeze(1)).view(-1)[: out.numel()])

    def exchange(
        self, mine: list[Codes], odd: list[bool], seeds: list[int], group: Any
    ) -> Future[tuple[list[Codes], list[bool]]]:
        sizes = [(c.scales.numel(), c.numel) for c in mine]
        # Every rank sends a code in a byte: what is stored is what counts.
        message = torch.cat([part for c in mine for part in (c.scales.view(torch.uint8), c.codes.view(torch.uint8))])

        def merge(messages: list[torch.Tensor]) -> list[Codes]:
            lengths = [n for scales, codes in sizes for n in (2 * scales, codes)]
            parts = [torch.split(m, lengths) for m in messages]
            found = []
            for at, (_, numel) in enumerate(sizes):
                total, one = torch.zeros(numel, device=message.device), torch.empty(numel, device=message.device)
                for rank in parts:
                    scales, codes = rank[2 * at].clone().view(torch.bfloat16), rank[2 * at + 1].view(torch.int8)
                    self.write(Codes(scales, codes, BLOCK, self.bits), one)
                    total += one.div_(len(parts))  # before it is added: then no sum is out of range, or by rounding alone
                found.append(self.compress(total.clamp_(-_LARGEST, _LARGEST), seeds[at]))
            return found

        return gathered(message, odd, group, merge)


def _rounded_up(scales: torch.Tensor) -> torch.Tensor:
    """As bfloat16, never smaller: then every product with a code is exact in float32."""
    bits = scales.view(torch.int32)
    return ((bits + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
