"""A command in a network of its own, with paths to chosen UDP ports outside, which have faults.

    python isolated_node.py PORT=TARGET ... -- COMMAND ...

Inside, 127.0.0.1:PORT leads to 127.0.0.1:TARGET outside; nothing else leads anywhere. So what the
command reaches, and what reaches it, passes here. Each line on standard input is a command: ``cut``
(nothing passes any more), ``join``, ``faults DELAY_MS LOSS_PERCENT`` (each way). SIGTERM is handed
on, and the exit code is the command's; killing this kills the command. Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import math
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).with_name("transport")))
from udp_proxy import Proxy

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1


def isolate() -> None:
    """Move this process into a network namespace of its own that has a loopback. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    user = os.geteuid()
    flags = _CLONE_NEWNET if user == 0 else _CLONE_NEWNET | _CLONE_NEWUSER
    if libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "this process may not have a network of its own")
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        now = struct.unpack("16sH14x", fcntl.ioctl(any_socket, _GET_FLAGS, request))[1]
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", now | _UP))


class Paths(Proxy):
    """Pairs of sockets, one inside and one outside: there is one client."""

    def __init__(self, ports: dict[int, int]) -> None:
        outside = {port: self.bind() for port in ports}
        isolate()
        none = dict.fromkeys(("delay", "jitter", "loss", "reorder", "duplicate", "reorder_by"), 0.0)
        super().__init__(argparse.Namespace(**none, to="127.0.0.1:9", mtu=65_535, seed=1))
        self.other: dict[socket.socket, socket.socket] = {}
        self.speaks_to: dict[socket.socket, tuple[str, int]] = {}
        self.targets: dict[socket.socket, tuple[str, int]] = {}
        for port, target in ports.items():
            inside = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            inside.bind(("127.0.0.1", port))
            inside.setblocking(False)
            self.other |= {inside: outside[port], outside[port]: inside}
            self.speaks_to[outside[port]] = self.targets[outside[port]] = "127.0.0.1", target
        for udp in self.other:
            self.selector.register(udp, selectors.EVENT_READ)

    def receive(self, udp: socket.socket) -> None:
        for _ in range(256):
            try:
                data, address = udp.recvfrom(65_535)
            except OSError:
                return
            if udp in self.other:
                # As a NAT does: from outside only who was spoken to comes in. Others' attempts to
                # dial would draw the answers to themselves.
                if address != self.targets.get(udp, address):
                    continue
                self.speaks_to[udp] = address
                other = self.other[udp]
                if (to := self.speaks_to.get(other)) is not None:
                    self.route(time.monotonic(), other, to, data)

    def command(self, line: str) -> None:
        name, *arguments = line.split()
        if name == "cut":
            self.hole_until = math.inf
        elif name == "join":
            self.hole_until = 0.0
        elif name == "faults":
            self.options.delay, self.options.loss = map(float, arguments)


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main() -> None:
    split = sys.argv.index("--")
    ports = dict(map(int, pair.split("=")) for pair in sys.argv[1:split])
    paths = Paths(ports)
    child = subprocess.Popen(
        sys.argv[split + 1 :],
        stdin=subprocess.DEVNULL,
        preexec_fn=die_with_parent,
    )
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())

    def end_with_child() -> None:
        code = child.wait()
        os._exit(code if code >= 0 else 128 - code)

    threading.Thread(target=end_with_child, daemon=True).start()
    paths.run()  # until standard input ends: whoever ran this has gone
    child.kill()


if __name__ == "__main__":
    main()
