"""Notices that this machine's network has changed: Wi-Fi to cable, a new address, waking up.

On Linux the kernel tells (rtnetlink(7)). Elsewhere nothing is said here, and links find out by
their pings.
"""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable
from typing import Any

import trio

logger = logging.getLogger(__name__)

_GROUPS = 0x1 | 0x10 | 0x100  # RTMGRP_LINK, RTMGRP_IPV4_IFADDR, RTMGRP_IPV6_IFADDR
_SETTLE = 0.5  # seconds: changes come in bursts


async def watch_network(changed: Callable[[], None]) -> None:
    """Call ``changed`` after each burst of changes, until cancelled."""
    if sys.platform != "linux":
        return
    try:
        netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
    except OSError as error:
        logger.debug("changes of the network are not told: %s", error)
        return
    waitable: Any = netlink
    with netlink:
        netlink.setblocking(False)
        try:
            netlink.bind((0, _GROUPS))
        except OSError as error:
            logger.debug("changes of the network are not told: %s", error)
            return
        while True:
            await trio.lowlevel.wait_readable(waitable)
            await trio.sleep(_SETTLE)
            _drain(netlink)
            logger.info("the network of this machine has changed")
            changed()


def _drain(netlink: socket.socket) -> None:
    while True:
        try:
            netlink.recv(65_536)
        except BlockingIOError:
            return
        except OSError:
            continue  # the kernel had more to say than fits: all the same to us
