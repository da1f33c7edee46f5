"""A node with nothing but transport and gossip, in a process of its own: FOLDER BOOT ADDRESS."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import trio

from mesh.gossip.service import GossipService
from mesh.identity import TrustStore, load_identity
from mesh.transport import Transport, TransportConfig


async def main(folder: Path, boot: int, address: str) -> None:
    identity = load_identity(folder / "node.key", folder / "node.pem", now=time.time())
    trust = TrustStore(identity.network, identity.roots, folder / "crl")
    config = TransportConfig(listen=("/ip4/127.0.0.1/udp/0/quic-v1",))
    async with Transport.open(config, identity, trust) as transport, trio.open_nursery() as nursery:
        gossip = GossipService(transport, identity, trust, boot=boot, rng=random.Random(boot))
        await nursery.start(gossip.run)
        if address:
            await transport.connect(address)
        print(transport.addresses[0], flush=True)
        await trio.sleep_forever()


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
