"""A UDP socket that moves batches: many datagrams per system call where the kernel can do that.

Linux takes a run of equal-sized datagrams in one call (UDP_SEGMENT) and hands one over joined
(UDP_GRO). Elsewhere, and where a network card refuses, each datagram is a call of its own.
"""

from __future__ import annotations

import errno
import logging
import socket
import struct
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import trio

from mesh.transport.errors import ListenError

logger = logging.getLogger(__name__)

Address = Any  # (host, port), and for IPv6 also flow and scope

_SOL_UDP = 17
_UDP_SEGMENT = 103
_UDP_GRO = 104
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE = 10, 23, 3  # linux/in.h, linux/in6.h
_IP_DONTFRAG, _IPV6_DONTFRAG = 28, 62  # macOS
_IP_RECVERR, _IPV6_RECVERR, _MSG_ERRQUEUE = 11, 25, 0x2000  # linux/in.h, linux/socket.h
_LARGEST_BATCH = 60_000  # bytes in one call: below the 64 KB of a UDP length with headers
_MOST_SEGMENTS = 60  # the kernel takes 64
_BUFFER = 4 << 20  # bytes of kernel buffer asked for in each direction
_READS_PER_WAKE = 64
_BACKLOG = 4096  # datagrams that wait for a full kernel buffer; beyond it QUIC's recovery helps


class UdpSocket:
    """One bound, non-blocking socket."""

    def __init__(self, host: str, port: int) -> None:
        """Bind ``host`` and ``port`` (0: any). Raises ListenError when that is not possible."""
        self.family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(self.family, socket.SOCK_DGRAM)
        self._waitable: Any = self._socket
        try:
            self._socket.setblocking(False)
            if self.family == socket.AF_INET6:
                self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # No SO_REUSEPORT or SO_REUSEADDR: with them a second process would take the port
            # without an error and half of the packets with it.
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            reason = (
                f"UDP port {port} on {host} is already in use"
                if error.errno in (errno.EADDRINUSE, getattr(errno, "WSAEADDRINUSE", -1))
                else f"cannot listen on UDP {host} port {port}: {error.strerror or error}"
            )
            raise ListenError(reason) from error
        self.address: Address = self._socket.getsockname()
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            self._try_option(socket.SOL_SOCKET, option, _BUFFER)
        self.can_forbid_fragments = self._forbid_fragments()
        self._reports_refusals = self._ask_for_refusals()
        self._segments = sys.platform == "linux"
        self._joins = sys.platform == "linux" and self._try_option(_SOL_UDP, _UDP_GRO, 1)
        self.refused: list[Address] = []
        self._backlog: deque[tuple[bytes, Address]] = deque()
        self._backlog_ready = trio.Event()
        self.closed = False

    def _try_option(self, level: int, option: int, value: int) -> bool:
        try:
            self._socket.setsockopt(level, option, value)
        except OSError:
            return False
        return True

    def _forbid_fragments(self) -> bool:
        """Set don't-fragment, so that a datagram too large for the path is lost, not split."""
        ipv6 = self.family == socket.AF_INET6
        level = socket.IPPROTO_IPV6 if ipv6 else socket.IPPROTO_IP
        if sys.platform == "linux":
            option = _IPV6_MTU_DISCOVER if ipv6 else _IP_MTU_DISCOVER
            return self._try_option(level, option, _PMTUDISC_PROBE)
        if sys.platform == "darwin":
            return self._try_option(level, _IPV6_DONTFRAG if ipv6 else _IP_DONTFRAG, 1)
        return False

    def _ask_for_refusals(self) -> bool:
        """Have the kernel say when a host answers that nobody listens on a port there. (Linux;
        without it the death of a peer's process is only noticed by its silence.)"""
        if sys.platform != "linux":
            return False
        if self.family == socket.AF_INET6:
            return self._try_option(socket.IPPROTO_IPV6, _IPV6_RECVERR, 1)
        return self._try_option(socket.IPPROTO_IP, _IP_RECVERR, 1)

    @property
    def host(self) -> str:
        return str(self.address[0])

    @property
    def port(self) -> int:
        return int(self.address[1])

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            trio.lowlevel.notify_closing(self._waitable)
            self._socket.close()
            self._backlog.clear()
            self._backlog_ready.set()

    # -- receiving ----------------------------------------------------------------------------

    async def wait_readable(self) -> None:
        await trio.lowlevel.wait_readable(self._waitable)

    def receive(self) -> Iterator[tuple[bytes, Address]]:
        """What has arrived, up to a bound, so that timers and other tasks get their turn."""
        for _ in range(_READS_PER_WAKE):
            size = 0
            try:
                if self._joins:
                    data, ancillary, _, address = self._socket.recvmsg(65535, 64)
                    for level, kind, value in ancillary:
                        if level == _SOL_UDP and kind == _UDP_GRO:
                            size = struct.unpack_from("i", value)[0]
                else:
                    data, address = self._socket.recvfrom(65535)
            except BlockingIOError:
                return
            except OSError as error:
                # An ICMP answer to something sent earlier, or the socket closed under us.
                if self.closed:
                    return
                logger.debug("receive: %s", error)
                self._read_refusals()
                continue
            if 0 < size < len(data):
                for start in range(0, len(data), size):
                    yield data[start : start + size], address
            else:
                yield data, address

    def _read_refusals(self) -> None:
        """Empty the socket's queue of errors, which otherwise stays readable for ever."""
        while self._reports_refusals:
            try:
                _, ancillary, _, address = self._socket.recvmsg(0, 512, _MSG_ERRQUEUE)
            except OSError:
                return
            for _, _, value in ancillary:
                # struct sock_extended_err begins with the errno.
                if len(value) >= 4 and struct.unpack_from("I", value)[0] == errno.ECONNREFUSED:
                    self.refused.append(address)

    def take_refusals(self, look: bool) -> list[Address]:
        """Addresses that have answered that nobody listens there, since the last call.

        ``look`` for ones that no call was told of: they make the socket readable with nothing to
        read.
        """
        if look and self._reports_refusals:
            self._read_refusals()
        refused, self.refused = self.refused, []
        return refused

    # -- sending ------------------------------------------------------------------------------

    def send(self, datagrams: list[tuple[bytes, Address]]) -> list[int]:
        """Send now what the kernel takes and keep the rest. Never raises.

        Errors of the network (unreachable for a moment, no route while Wi-Fi changes) are the
        same as loss to QUIC. Returns the sizes of datagrams refused as too large for the path.
        """
        if self._backlog:
            self._keep(datagrams)
            return []
        too_large: list[int] = []
        position = 0
        again = True
        while position < len(datagrams):
            run = self._run_length(datagrams, position) if self._segments else 1
            first, address = datagrams[position]
            try:
                if run > 1:
                    batch = [data for data, _ in datagrams[position : position + run]]
                    size = struct.pack("H", len(first))
                    self._socket.sendmsg(batch, [(_SOL_UDP, _UDP_SEGMENT, size)], 0, address)
                else:
                    self._socket.sendto(first, address)
            except BlockingIOError:
                self._keep(datagrams[position:])
                return too_large
            except OSError as error:
                if self.closed:
                    return too_large
                if again:
                    # It may be what an earlier datagram, perhaps to somebody else, has met with:
                    # a socket tells that once, in place of sending.
                    again = False
                    continue
                if run > 1 and error.errno in (errno.EIO, errno.EINVAL, errno.EOPNOTSUPP):
                    logger.info("the system refuses batched sending; sending one by one")
                    self._segments = False
                    continue
                if error.errno == errno.EMSGSIZE:
                    too_large.append(len(first))
                else:
                    logger.debug("send to %s: %s", address, error)
            position += run
            again = True
        return too_large

    @staticmethod
    def _run_length(datagrams: list[tuple[bytes, Address]], start: int) -> int:
        """How many datagrams from ``start`` one call can take: same address, all of one size but
        the last, which may be shorter."""
        first, address = datagrams[start]
        size = total = len(first)
        count = 1
        for data, other in datagrams[start + 1 : start + _MOST_SEGMENTS]:
            length = len(data)
            if length > size or total + length > _LARGEST_BATCH or other != address:
                break
            total += length
            count += 1
            if length < size:
                break
        return count

    def _keep(self, datagrams: list[tuple[bytes, Address]]) -> None:
        room = _BACKLOG - len(self._backlog)
        self._backlog.extend(datagrams[:room])
        self._backlog_ready.set()

    async def drain_backlog(self) -> None:
        """Send what waits whenever the kernel has room again. Runs until the socket is closed."""
        while not self.closed:
            await self._backlog_ready.wait()
            self._backlog_ready = trio.Event()
            while self._backlog and not self.closed:
                try:
                    await trio.lowlevel.wait_writable(self._waitable)
                except trio.ClosedResourceError:
                    return
                waiting = list(self._backlog)
                self._backlog.clear()
                self.send(waiting)
