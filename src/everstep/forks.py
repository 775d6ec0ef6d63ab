"""Whether this process was forked since an object was made.

Asking the system for the process id costs microseconds where the caches are full of tensors, several times a step.
"""

from __future__ import annotations

import os

count = 0
"""Another number in a forked child than in its parent."""


def _forked() -> None:
    global count
    count += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
