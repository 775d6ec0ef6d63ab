"""All ranks compress in the same way, or none does."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
import torch.distributed as dist

from everstep.errors import MismatchError

_BYTES = 512


def agree(mine: dict[str, Any], group: Any, device: torch.device) -> None:
    """MismatchError, on every rank, unless all describe the same. A collective: at the first step, before any other."""
    data = msgspec.json.encode(mine)[:_BYTES]
    message = torch.zeros(_BYTES, dtype=torch.uint8)
    message[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    message = message.to(device)
    found = [torch.empty_like(message) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, message, group=group)
    texts = [bytes(m.cpu().numpy()).rstrip(b"\0").decode() for m in found]
    check_same(texts)


def check_same_compressor(compressor: Any, cursor: dict[str, Any]) -> None:
    """MismatchError if the step of this cursor was written with another compressor, or with one and none is given."""
    then = cursor.get("compress", {}).get("by")
    now = None if compressor is None else compressor.describe()
    if then is not None and then != now:
        raise MismatchError(
            f"the run's gradients were compressed by {then}, and now by {now or 'nothing'}: pass compress= with the same "
            "compressor as before, or go on under another path from everstep.open(run).restore(...)"
        )


def check_same(texts: list[str]) -> None:
    """MismatchError unless all ranks' descriptions are equal."""
    for rank, text in enumerate(texts):
        if text != texts[0]:
            raise MismatchError(
                f"ranks compress differently: rank 0 by {texts[0]}, rank {rank} by {text}. Give all the same compressor"
            )
