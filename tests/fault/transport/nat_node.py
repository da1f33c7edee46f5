"""A transport in a namespace of its own, driven by lines of JSON on standard input and output."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ca.certificate import load_root
from ca.issue import issue, make_root
from ca.naming import Role
from mesh.identity import TrustStore, identity_of
from mesh.transport import LinkMoved, LinkUp, Message, Request, Transport, TransportConfig


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


async def main(name: str, address: str) -> None:
    now = time.time()
    ca_key = Ed25519PrivateKey.from_private_bytes(b"nat test".ljust(32, b"."))
    root = load_root(make_root(ca_key, "nat", serial=1, now=now - 3600))
    key = Ed25519PrivateKey.from_private_bytes(name.encode().ljust(32, b"."))
    certificate = issue(
        ca_key,
        root.der,
        network="nat",
        name=name,
        public_key=key.public_key(),
        roles=[Role.SERVE, Role.USE],
        serial=2,
        now=now,
    )
    identity = identity_of(key, [certificate], [root], now=now)

    async def echo(request: Request) -> Message:
        return request.message

    config = TransportConfig(listen=(f"/ip4/{address}/udp/0/quic-v1",))
    with tempfile.TemporaryDirectory() as folder:
        trust = TrustStore("nat", [root], Path(folder))
        async with Transport.open(config, identity, trust) as transport:
            transport.serve("echo", echo)
            say(peer=transport.peer_id, addresses=transport.addresses)

            async def watch() -> None:
                async with transport.events() as events:
                    async for event in events:
                        if isinstance(event, LinkUp | LinkMoved):
                            say(
                                event=type(event).__name__,
                                peer=event.link.peer,
                                path=event.link.path,
                                at=time.monotonic(),
                            )

            async def ask(peer: str, count: int) -> None:
                """Requests one after the other, each answered once and in order."""
                for number in range(count):
                    answer = await transport.links[peer].request("echo", number)  # type: ignore[index]
                    if answer.body != number:
                        raise ValueError("a wrong answer")
                    await trio.sleep(0.01)
                say(asked=count)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch)
                while True:
                    line = await trio.to_thread.run_sync(sys.stdin.readline)
                    if not line:
                        break
                    command = json.loads(line)
                    if "link" in command:
                        link = await transport.link_to(
                            command["link"], command["addresses"], timeout=15
                        )
                        say(linked=link.peer, path=link.path)
                        if "ask" in command:
                            nursery.start_soon(ask, command["link"], command["ask"])
                    else:
                        say(reachable=transport.is_reachable, addresses=transport.addresses)
                nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, sys.argv[1], sys.argv[2])
