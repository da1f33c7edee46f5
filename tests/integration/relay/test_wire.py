"""What peers may ask over a real link."""

from __future__ import annotations

import pytest
import trio

from ca.naming import Role
from mesh.relay.messages import OPEN, PROBE
from mesh.transport import RemoteError


def test_roles_and_refusals_arrive_by_name(open_mesh) -> None:
    async def main() -> None:
        async with open_mesh() as mesh:
            holder = await mesh.add("holder")
            guest = await mesh.add("guest", roles=(Role.USE,))
            peer = await mesh.add("peer")
            address = holder.transport.addresses[0]
            body = {
                "chain": b"c" * 16, "epoch": 1, "previous": peer.peer, "next": peer.peer,
                "model": "m" * 64, "first": 1, "last": 2, "layers": 3, "rank": 1, "stages": 3,
                "activations": "f32", "version": 1,
                "sessions": [{"session": 1, "capacity": 16, "prompt": 4}],
            }  # fmt: skip
            for node, kind, wanted, code in [
                (guest, OPEN, body, "forbidden"),
                (guest, PROBE, {"chain": b"c" * 16}, "forbidden"),
                (peer, OPEN, body, "unknown_model"),
                (peer, OPEN, {**body, "last": 9}, "malformed"),
                (peer, OPEN, None, "malformed"),
                (peer, PROBE, {"chain": b"c" * 16}, "unknown_chain"),
            ]:
                link = await node.transport.connect(address)
                with pytest.raises(RemoteError) as caught:
                    await link.request(kind, wanted)
                assert caught.value.code == code
                assert caught.value.message

    trio.run(main)


def test_cancelling_frees_every_stage(open_mesh, requests, read_all) -> None:
    async def main() -> None:
        async with open_mesh() as mesh:
            chain = await mesh.chain((13,))
            [request] = requests(1, 500, seeded=True)
            for moment in (0.0, 0.01, 0.2, 1.5):
                with trio.move_on_after(moment):
                    await read_all(chain, request)
                await mesh.empty()
            assert chain.head.idle

    trio.run(main)
