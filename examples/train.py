"""Train a small GPT. With --run, every step is saved, and a run that was killed goes on where it stopped.

    python examples/train.py --run runs/gpt
"""

from __future__ import annotations

import argparse
import itertools
import json
import math

import torch
from gpt import SIZES, build, digest, learn, live_state

import everstep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", help="folder to save every step in; without it nothing is saved")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--base-interval", type=int, default=40)
    parser.add_argument("--report", action="store_true", help="tell everything as JSON lines (for demo.py)")
    parser.add_argument("--final", help="file to put the final state in")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, optimizer, schedule, loader = build(SIZES[args.size], args.steps)

    def tell(**event: object) -> None:
        if args.report:
            print(json.dumps(event), flush=True)
        else:
            print("  ".join(f"{k} {v}" for k, v in event.items() if k != "digest"), flush=True)

    if args.run is None:
        passes = itertools.chain.from_iterable(loader for _ in itertools.count())
        for step, batch in enumerate(itertools.islice(passes, args.steps), 1):
            loss = learn(model, optimizer, batch)
            schedule.step()
            tell(step=step, loss=loss, digest=digest(live_state(model, optimizer)))
    else:
        options = {"base_interval": args.base_interval, "retention": everstep.Retention(window_steps=60)}
        with everstep.attach(model, optimizer, args.run, extras={"schedule": schedule}, **options) as run:
            tell(resumed=run.resume(), seconds=run.stats()["resume_s"])
            for batch in run.steps(loader, epochs=math.ceil(args.steps / len(loader))):
                if run.step == args.steps:
                    break
                loss = learn(model, optimizer, batch)
                schedule.step()
                tell(step=run.step + 1, loss=loss)
    if args.final:
        torch.save({"state": live_state(model, optimizer), "rng": torch.get_rng_state(),
                    "schedule": schedule.state_dict()}, args.final)  # fmt: skip


if __name__ == "__main__":
    main()
