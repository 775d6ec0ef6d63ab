"""Half: 16 bits of each element."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from everstep.compress.compressor import Compressor
from everstep.errors import UsageError
from everstep.payloads import Words

KINDS = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Half(Compressor[Words]):
    """Rounds each element to float16 or bfloat16. What float16 cannot hold becomes its largest number."""

    def __init__(self, kind: str = "fp16", *, error_feedback: bool = False, residual: str = "base") -> None:
        if kind not in KINDS:
            raise UsageError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
        super().__init__(error_feedback=error_feedback, residual=residual)
        self.kind = kind
        self._largest = torch.finfo(KINDS[kind]).max

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "bits": self.kind}

    def compress(self, flat: torch.Tensor, seed: int) -> Words:
        return Words(flat.clamp(-self._largest, self._largest).to(KINDS[self.kind]))

    def write(self, payload: Words, out: torch.Tensor) -> None:
        out.copy_(payload.words)

    def exchange(
        self, mine: list[Words], odd: list[bool], seeds: list[int], group: Any
    ) -> Future[tuple[list[Words], list[bool]]]:
        sizes = [w.numel for w in mine]
        # Divided first: then no sum is out of range, or by rounding alone.
        words = torch.cat([w.words for w in mine]).div_(dist.get_world_size(group))
        message = torch.cat([words, torch.tensor(odd, dtype=words.dtype, device=words.device)])
        work: Any = dist.all_reduce(message, group=group, async_op=True)

        def mean(done: Future[Any]) -> tuple[list[Words], list[bool]]:
            done.value()  # raises if another rank has died: then `message` is not the sum
            *found, flags = torch.split(message, [*sizes, len(odd)])
            return [Words(w.clamp_(-self._largest, self._largest)) for w in found], (flags > 0).tolist()

        future: Future[tuple[list[Words], list[bool]]] = work.get_future().then(mean)
        return future
