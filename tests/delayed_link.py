"""Join a node to the switch by a link with a delay: python delayed_link.py NODE SWITCH NUMBER SECONDS

NODE and SWITCH are the processes that hold the network namespaces. Both ends of the link are TAP devices, `eth0` in the node
and `port<NUMBER>` at the switch, and this process carries the frames between them, as the kernel's netem would. The link
ends with the process.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
TAP, NO_HEADERS = 0x0002, 0x1000
FRAME = 1 << 16


def open_tap(process: str, name: str) -> int:
    """Return a new TAP device in the network namespace of a process."""
    with Path(f"/proc/{process}/ns/net").open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):  # `os.setns` needs Python 3.12
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP | NO_HEADERS))
    return device


def carry(ends: tuple[int, int], delay: float) -> None:
    """Carry frames from each end to the other, `delay` seconds later."""
    queues: dict[int, deque[tuple[float, bytes]]] = {end: deque() for end in ends}
    opposite = dict(zip(ends, reversed(ends), strict=True))
    while True:
        due = min((queue[0][0] for queue in queues.values() if queue), default=None)
        wait = None if due is None else max(0.0, due - time.monotonic())
        for end in select.select(ends, [], [], wait)[0]:
            queues[opposite[end]].append((time.monotonic() + delay, os.read(end, FRAME)))
        for end, queue in queues.items():
            while queue and queue[0][0] <= time.monotonic():
                with suppress(OSError):  # the frame is lost, as where a device is not up yet
                    os.write(end, queue.popleft()[1])


if __name__ == "__main__":
    node, switch, number, seconds = sys.argv[1:]
    taps = open_tap(node, "eth0"), open_tap(switch, f"port{number}")
    print("ready", flush=True)
    carry(taps, float(seconds))
