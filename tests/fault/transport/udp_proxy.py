"""A UDP path with faults, as a process: delay, jitter, loss, reordering, duplication, another port.

    python udp_proxy.py --to HOST:PORT [--delay MS] [--jitter MS] [--loss PERCENT] ...

prints the port it listens on. Each line on standard input is a command: ``rebind`` (clients appear
from new ports from now on, as after a NAT's restart), ``hole SECONDS`` (nothing passes),
``delay MS`` (of what comes from now on), ``stats``.
Runs until standard input ends.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import selectors
import socket
import sys
import time


class Proxy:
    def __init__(self, options: argparse.Namespace) -> None:
        host, _, port = options.to.rpartition(":")
        self.target = host, int(port)
        self.options = options
        self.random = random.Random(options.seed)
        self.selector = selectors.DefaultSelector()
        self.front = self.bind()
        self.selector.register(self.front, selectors.EVENT_READ)
        self.backs: dict[tuple[str, int], socket.socket] = {}
        self.clients: dict[socket.socket, tuple[str, int]] = {}
        self.queue: list[tuple[float, int, socket.socket, tuple[str, int], bytes]] = []
        self.order = itertools.count()
        self.hole_until = 0.0
        self.passed = self.dropped = 0

    @staticmethod
    def bind() -> socket.socket:
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind(("127.0.0.1", 0))
        udp.setblocking(False)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            udp.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
        return udp

    def back_for(self, client: tuple[str, int]) -> socket.socket:
        back = self.backs.get(client)
        if back is None:
            back = self.backs[client] = self.bind()
            self.clients[back] = client
            self.selector.register(back, selectors.EVENT_READ)
        return back

    def rebind(self) -> None:
        for back in list(self.clients):
            self.selector.unregister(back)
            back.close()
        self.clients.clear()
        self.backs.clear()

    def route(self, now: float, out: socket.socket, to: tuple[str, int], data: bytes) -> None:
        options = self.options
        lost = self.random.random() * 100 < options.loss
        if now < self.hole_until or lost or len(data) > options.mtu:
            self.dropped += 1
            return
        copies = 2 if self.random.random() * 100 < options.duplicate else 1
        for _ in range(copies):
            delay = options.delay + self.random.uniform(0, options.jitter)
            if self.random.random() * 100 < options.reorder:
                delay += options.reorder_by
            heapq.heappush(self.queue, (now + delay / 1000, next(self.order), out, to, data))
        self.passed += 1

    def receive(self, udp: socket.socket) -> None:
        for _ in range(256):
            try:
                data, address = udp.recvfrom(65_535)
            except OSError:
                return
            now = time.monotonic()
            if udp is self.front:
                self.route(now, self.back_for(address), self.target, data)
            elif udp in self.clients:
                self.route(now, self.front, self.clients[udp], data)

    def release(self) -> None:
        now = time.monotonic()
        while self.queue and self.queue[0][0] <= now:
            _, _, out, to, data = heapq.heappop(self.queue)
            if out.fileno() < 0:
                continue
            try:
                out.sendto(data, to)
            except OSError:
                self.dropped += 1

    def command(self, line: str) -> None:
        name, *arguments = line.split()
        if name == "rebind":
            self.rebind()
        elif name == "hole":
            self.hole_until = time.monotonic() + float(arguments[0])
        elif name == "delay":
            self.options.delay = float(arguments[0])
        print(f"ok {self.passed} {self.dropped}", flush=True)

    def run(self) -> None:
        self.selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            wait = self.queue[0][0] - time.monotonic() if self.queue else None
            for key, _ in self.selector.select(None if wait is None else max(wait, 0)):
                if key.fileobj is sys.stdin:
                    line = sys.stdin.readline()
                    if not line:
                        return
                    self.command(line)
                else:
                    self.receive(key.fileobj)  # type: ignore[arg-type]
            self.release()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--to", required=True)
    for name in ("delay", "jitter", "loss", "reorder", "duplicate"):
        parser.add_argument(f"--{name}", type=float, default=0.0)
    parser.add_argument("--reorder-by", type=float, default=20.0, help="milliseconds")
    parser.add_argument("--mtu", type=int, default=65_535, help="larger datagrams are dropped")
    parser.add_argument("--seed", type=int, default=1)
    proxy = Proxy(parser.parse_args())
    print(proxy.front.getsockname()[1], flush=True)
    proxy.run()


if __name__ == "__main__":
    main()
