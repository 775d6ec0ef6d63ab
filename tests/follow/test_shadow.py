"""The shadow: real processes, killed, stopped and found again. What it holds is what the trainer has, bit for bit."""

from __future__ import annotations


