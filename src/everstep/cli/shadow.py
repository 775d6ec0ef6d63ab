"""`everstep shadow`: keep shadows for trainers of other hosts, or ask a run's shadow on this host how it is."""

from __future__ import annotations

import math
import os
from typing import Annotated

import typer

from everstep.errors import UsageError


def shadow(
    listen: Annotated[str, typer.Option("--listen", help="HOST:PORT to listen on.")],
    folder: Annotated[str, typer.Option("--dir", help="Where runs' documents and bases are kept.")] = "shadows",
    token_file: Annotated[
        str | None, typer.Option("--token-file", help="File with the token that trainers must prove. Or set EVERSTEP_TOKEN.")
    ] = None,
    certfile: Annotated[str | None, typer.Option("--cert", help="Certificate (PEM) for TLS.")] = None,
    keyfile: Annotated[str | None, typer.Option("--key", help="Its private key, if not in the same file.")] = None,
    interval: Annotated[int, typer.Option("--base-interval", help="Steps between bases.")] = 200,
    max_memory: Annotated[float, typer.Option("--max-memory", help="GB of a run's log that may wait in memory.")] = 8.0,
    idle: Annotated[float, typer.Option("--idle", help="Seconds without a trainer after which a shadow ends.")] = 86400.0,
) -> None:
    """Keep shadows for trainers of other hosts: attach(..., mode="shadow", shadow="tcp://HOST:PORT").

    Listens beyond this machine only with a token. Ends on Ctrl-C or SIGTERM, after a base of every run's last step.
    """
    from everstep.follow import remote

    token = os.environ.get("EVERSTEP_TOKEN")
    if token_file is not None:
        try:
            with open(token_file) as f:
                token = f.read().strip()
        except (OSError, UnicodeDecodeError) as e:
            raise UsageError(f"the token file {token_file} cannot be read: {getattr(e, 'strerror', e)}") from e
        if not token:
            raise UsageError(f"the token file {token_file} is empty: whoever connects would be let in")
    if interval < 1:
        raise UsageError(f"--base-interval must be at least 1, not {interval}")
    for name, value in (("--max-memory", max_memory), ("--idle", idle)):
        if not 0 < value < math.inf:
            raise UsageError(f"{name} must be a number above 0, not {value}")
    remote.main(
        listen, folder, token=token.encode() if token else None, certfile=certfile, keyfile=keyfile, interval=interval,
        max_bytes=int(max_memory * 1e9), idle_s=idle,
        ready=lambda listener: print(f"everstep: shadows listen on {listener.getsockname()}", flush=True),
    )  # fmt: skip
