"""What both ways of storing have in common: where they write, and the training thread's time."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

_LOOK_UP = 16
"""Calls between a gradient scaler's step() and a hook of the optimizer's are fewer."""


@dataclass(frozen=True)
class Destination:
    """Where bases of this generation go and what they say about themselves."""

    run: str
    timeline: int
    generation: int
    bases: str
    direct: bool
    fingerprint: dict[str, Any]
    rank: int = 0
    is_shared: bool = False
    """Other ranks train with this one: steps are counted by updates alone, or the ranks would count differently."""


class Recorder:
    """Frames (capture.py) or states (states.py) of one generation."""

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self.thread_s = self.stall_s = self.step_s = 0.0
        self.trained_s = 0.0
        """Time of all steps, stalls included, pauses left out."""
        self._stall_before_s = 0.0
        self._last_commit = time.perf_counter()
        self.scalers: list[Any] = []
        """Gradient scalers that have called an attached optimizer's first step."""

    def look_for_scaler(self) -> None:
        """In a hook of an optimizer's step: nothing but the stack tells who has called it."""
        frame = sys._getframe(1)
        for _ in range(_LOOK_UP):
            caller = frame.f_locals.get("self")
            if isinstance(caller, torch.amp.GradScaler):
                if not any(caller is each for each in self.scalers):
                    self.scalers.append(caller)
                return
            if frame.f_back is None:
                return
            frame = frame.f_back

    @property
    def generation(self) -> int:
        return self._destination.generation

    @property
    def timeline(self) -> int:
        return self._destination.timeline

    def count_time(self) -> float:
        """At a commit. Returns how long the step was stalled."""
        ended = time.perf_counter()
        took, self._last_commit = ended - self._last_commit, ended
        # A pause (validation, a debugger) is not a step.
        self.step_s = took if self.step_s == 0.0 else 0.9 * self.step_s + 0.1 * min(took, 2 * self.step_s)
        stalled, self._stall_before_s = self.stall_s - self._stall_before_s, self.stall_s
        self.trained_s += stalled + min(max(took - stalled, 0.0), 2 * self.step_s)
        return stalled
