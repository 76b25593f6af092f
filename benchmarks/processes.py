"""Processor time and memory of a process and its children, read from `/proc` (Linux only; psutil is not needed)."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20
TICK = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Memory:
    """Memory of a family of processes, in MiB.

    Attributes:
        peak: sum over the processes of each one's largest resident set (`VmHWM`). A page that several of them map
            counts once for each, and their peaks need not coincide, so this is an upper bound.
        proportional: sum of the present proportional sets (`Pss`), in which a shared page counts once in all.
        largest: the largest single peak.
    """

    peak: float
    proportional: float
    largest: float


def family(pid: int) -> list[int]:
    """`pid` and all its living descendants."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        children += [int(word) for word in (task / "children").read_text().split()]
    return [pid, *(descendant for child in children for descendant in family(child))]


def cpu_seconds(pid: int) -> float:
    """Processor time that a family has used so far, user and system, in steps of one clock tick (10 ms)."""
    total = 0.0
    for member in family(pid):
        fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) * TICK
    return total


def memory(pid: int) -> Memory:
    """Memory of a family. A helper process that multiprocessing starts (its resource tracker) is counted too."""
    peaks = [_field(f"/proc/{member}/status", "VmHWM") for member in family(pid)]
    shares = [_field(f"/proc/{member}/smaps_rollup", "Pss") for member in family(pid)]
    return Memory(sum(peaks), sum(shares), max(peaks))


def machine() -> dict[str, object]:
    """What the figures were measured on, and how busy it was."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
    }


def _field(file: str, key: str) -> float:
    """A `Key:  123 kB` line, in MiB."""
    for line in Path(file).read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) / 1024
    return 0.0
