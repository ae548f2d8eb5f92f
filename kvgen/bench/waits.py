"""waits: how long threads of this process waited for a core, as Linux counts it.

A sample in which a thread was runnable but waited measures the neighbour, not the kernel. The counter is the
second field of ``/proc/self/task/*/schedstat``; all threads are summed, OpenMP's and other runtimes' too.
Time that a hypervisor takes is not in it: ``steal_ticks`` sees that, for the whole machine.
"""

from __future__ import annotations

from pathlib import Path

_TASKS = Path("/proc/self/task")
_STAT = Path("/proc/stat")


def waited_ns(tasks: Path = _TASKS) -> int | None:
    """Nanoseconds that all threads have been runnable but not running; None where they are not counted."""
    total, seen = 0, False
    try:
        entries = list(tasks.iterdir())
    except OSError:
        return None
    for task in entries:
        try:
            total += int((task / "schedstat").read_text().split()[1])
        except (OSError, IndexError, ValueError):  # a thread that just ended, or a kernel without the counter
            continue
        seen = True
    return total if seen else None


def steal_ticks(stat: Path = _STAT) -> tuple[int, int] | None:
    """(ticks stolen by the hypervisor, ticks in all) since boot; None where the kernel does not say."""
    try:
        words = stat.read_text().split("\n", 1)[0].split()
        ticks = [int(word) for word in words[1:9]]
    except (OSError, ValueError):
        return None
    return (ticks[7], sum(ticks)) if words[0] == "cpu" and len(ticks) == 8 else None
