"""Where a benchmark ran: the facts without which its numbers mean nothing."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from everstep.store.files import supports_direct


def facts(folder: str) -> dict[str, Any]:
    """Processor, memory, software, and the file system of `folder`."""
    return {
        "cpu": _cpu(),
        "cores": num_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "file_system": file_system(folder),
        "direct_io": supports_direct(folder),
        "load_average": os.getloadavg()[0],
    }


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            for line in f:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def file_system(folder: str) -> str:
    """The type of the file system that holds this folder, as the kernel names it."""
    best, kind = "", "unknown"
    real = os.path.realpath(folder)
    try:
        with open("/proc/self/mounts") as f:
            for line in f:
                _, mount, type_ = line.split()[:3]
                inside = mount == "/" or real == mount or real.startswith(mount + "/")
                if inside and len(mount) >= len(best):
                    best, kind = mount, type_
    except OSError:
        pass
    return kind


def resident_bytes(pid: int | str = "self") -> int:
    """Memory that a process holds; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def thread_cpu_s(native_id: int) -> float:
    """Processor time of one thread of this process; 0 if it is gone."""
    try:
        with open(f"/proc/self/task/{native_id}/schedstat") as f:
            return int(f.read().split()[0]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def process_cpu_s(pid: int) -> float:
    """Processor time of another process; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            fields = f.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0
