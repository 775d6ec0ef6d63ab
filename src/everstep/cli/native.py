"""`everstep native`: build the native part for this interpreter and this torch."""

from __future__ import annotations


def native() -> None:
    """Build the optional native part, which takes less of the training thread's time. Needs a C++ compiler.

    Build it again after an upgrade of torch.
    """
    from everstep import native as part

    print(f"built {part.build()}")
