"""What saving every step costs: two equal models in one process, blocks of steps in turn, one of them saved.

A block that is saved ends when its last step is durable (`flush`), inside its time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time

import torch
from gpt import SIZES, build, learn

import everstep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=8, help="in a block")
    args = parser.parse_args()
    torch.set_num_threads(1)
    saved, plain = build(SIZES[args.size], 10_000), build(SIZES[args.size], 10_000)
    batches = itertools.cycle(list(itertools.islice(plain[3], 16)))
    options = {"extras": {"schedule": saved[2]}, "base_interval": 40, "quiet": True}
    with everstep.attach(saved[0], saved[1], args.run, **options) as run:
        run.resume()

        def block(steps: int, *, on: bool) -> float:
            model, optimizer, schedule, _ = saved if on else plain
            begun = time.perf_counter()
            for _ in range(steps):
                learn(model, optimizer, next(batches))
                schedule.step()
                if on:
                    run.commit()
            if on:
                run.flush()
            return time.perf_counter() - begun

        for on in (True, False):
            block(6, on=on)  # the first steps copy gradients while it is learned who owns them
        for _ in range(args.pairs):
            first = random.random() < 0.5
            took = {on: block(args.steps, on=on) for on in (first, not first)}
            print(json.dumps({"on": took[True], "off": took[False]}), flush=True)
        print(json.dumps({"bytes_a_step": run.stats()["bytes_a_step"]}), flush=True)


if __name__ == "__main__":
    main()
