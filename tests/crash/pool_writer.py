"""A process of its own: on `start FOLDER MEDIUM` it forks one that writes a pool until it is killed, and tells its pid.

After each commit the step is written to FOLDER.told. `wait` answers with how the last one ended.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

from everstep.store.bases import piece_sums
from everstep.store.medium import Mapped, Synced
from pools import WRITTEN, bytes_of_step, create, fields


def write(folder: str, medium: str) -> None:
    pool = create(folder, slots=WRITTEN, medium={"mapped": Mapped, "synced": Synced}[medium])
    told = os.open(f"{folder}.told", os.O_RDWR | os.O_CREAT)
    for step in range(1, 100_000):
        writer = pool.begin(step)
        for index in reversed(writer.order) if step % 2 else writer.order:
            slot, memory = WRITTEN[index], writer.memory(index)
            memory[:] = np.frombuffer(bytes_of_step(slot, step), np.uint8)
            writer.set_sums(index, piece_sums(memory, slot.uid, slot.dtype.itemsize))
        writer.finish(**fields(step))
        os.pwrite(told, step.to_bytes(8, "little"), 0)


def main() -> None:
    pid = 0
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "start":
            pid = os.fork()
            if pid == 0:
                signal.alarm(100)  # should nobody kill it
                try:
                    write(*rest)
                finally:
                    os._exit(1)
            print(pid, flush=True)
        else:
            print(-os.WTERMSIG(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
