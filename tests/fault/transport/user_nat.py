"""A port-restricted NAT as a process, between two network namespaces. Linux, as root.

    python user_nat.py INSIDE OUTSIDE PUBLIC_IP

Takes the IPv4/UDP packets of namespace INSIDE from a TUN device there (default route, 192.168.77.2)
and sends them from PUBLIC_IP in namespace OUTSIDE, one public port for each inside port. What comes
back passes only from an address and port that the inside has sent to. Prints ``ready``, then runs
until killed. No packet filter of the kernel is needed.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import selectors
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

INSIDE_IP = "192.168.77.2"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_REMEMBER = 30.0  # seconds for which the inside's packets let answers in

libc = ctypes.CDLL(None, use_errno=True)


def enter(namespace: str) -> None:
    with Path(f"/var/run/netns/{namespace}").open("rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


def open_tun() -> int:
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH", b"nat0", _IFF_TUN | _IFF_NO_PI))
    for command in (
        f"ip addr add {INSIDE_IP}/24 dev nat0",
        "ip link set nat0 up mtu 1500",
        "ip route add default dev nat0",
    ):
        subprocess.run(command.split(), check=True)
    os.set_blocking(tun, False)
    return tun


def checksum(data: bytes) -> int:
    if len(data) % 2:
        data += b"\0"
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def packet(source: tuple[str, int], target: tuple[str, int], payload: bytes) -> bytes:
    length = 8 + len(payload)
    udp = struct.pack("!HHHH", source[1], target[1], length, 0)  # no checksum: allowed in IPv4
    head = struct.pack(
        "!BBHHHBBH4s4s",
        *(0x45, 0, 20 + length, 0, 0, 64, socket.IPPROTO_UDP, 0),
        *(socket.inet_aton(source[0]), socket.inet_aton(target[0])),
    )
    return head[:10] + struct.pack("!H", checksum(head)) + head[12:] + udp + payload


def main() -> None:
    inside, outside, public = sys.argv[1:]
    enter(inside)
    tun = open_tun()
    enter(outside)
    selector = selectors.DefaultSelector()
    selector.register(tun, selectors.EVENT_READ)
    by_port: dict[int, socket.socket] = {}
    ports: dict[int, int] = {}
    spoken: dict[int, dict[tuple[str, int], float]] = {}
    print("ready", flush=True)
    while True:
        for key, _ in selector.select():
            now = time.monotonic()
            if key.fd == tun:
                data = os.read(tun, 65_535)
                if len(data) < 28 or data[0] >> 4 != 4 or data[9] != socket.IPPROTO_UDP:
                    continue
                offset = (data[0] & 15) * 4
                port, to = struct.unpack_from("!HH", data, offset)
                target = socket.inet_ntoa(data[16:20]), to
                udp = by_port.get(port)
                if udp is None:
                    udp = by_port[port] = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                    udp.bind((public, 0))
                    udp.setblocking(False)
                    ports[udp.fileno()] = port
                    spoken[udp.fileno()] = {}
                    selector.register(udp, selectors.EVENT_READ)
                spoken[udp.fileno()][target] = now
                try:
                    udp.sendto(data[offset + 8 :], target)
                except OSError:
                    continue
            else:
                udp = key.fileobj  # type: ignore[assignment]
                try:
                    payload, source = udp.recvfrom(65_535)
                except OSError:
                    continue
                if now - spoken[key.fd].get(source, -_REMEMBER) < _REMEMBER:
                    os.write(tun, packet(source, (INSIDE_IP, ports[key.fd]), payload))


if __name__ == "__main__":
    main()
