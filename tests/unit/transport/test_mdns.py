"""Finding peers by mDNS, among others on the network who say what they like."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import trio
from zeroconf import DNSOutgoing, DNSPointer, ServiceInfo, Zeroconf, const

from mesh.identity import PeerId
from mesh.transport.mdns import SERVICE, Found, LocalDiscovery

ME = PeerId("12D3KooWDEtuzYEaBkYwvRKEhXLiGAcotDqXdoUbdvbSCrffY6b2")
OTHER = PeerId("12D3KooWEDXaiinuiciXLp6H2AHX8nUYc6dobM17nXAywmEiyndL")
PLACE = f"/ip4/127.0.0.1/udp/4001/quic-v1/p2p/{OTHER}"


def discovery(peer: PeerId, found: Found = lambda *_: None) -> LocalDiscovery:
    return LocalDiscovery(network="n", peer_id=peer, found=found, interfaces=["127.0.0.1"])


def say_there_is(name: str) -> None:
    out = DNSOutgoing(const._FLAGS_QR_RESPONSE | const._FLAGS_AA)
    pointer = DNSPointer(SERVICE, const._TYPE_PTR, const._CLASS_IN, 4500, name)
    out.add_answer_at_time(pointer, 0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        here = socket.inet_aton("127.0.0.1")
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, here)
        sender.sendto(out.packets()[0], ("224.0.0.251", 5353))


def test_a_name_that_is_no_name_ends_nothing() -> None:
    heard: list[tuple[PeerId, Sequence[str]]] = []

    async def main() -> None:
        seen = trio.Event()

        def found(peer: PeerId, addresses: Sequence[str]) -> None:
            heard.append((peer, addresses))
            seen.set()

        looked_at: list[str] = []
        ours = discovery(ME, found)
        look_at = ours._look_at

        async def watched(zeroconf: Zeroconf, name: str) -> None:
            await look_at(zeroconf, name)
            looked_at.append(name)

        ours._look_at = watched  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ours.run, [])
            with trio.fail_after(10):
                while "evil._tcp.example." not in looked_at:
                    say_there_is("evil._tcp.example.")
                    await trio.sleep(0.05)
                nursery.start_soon(discovery(OTHER).run, [PLACE])
                await seen.wait()
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert heard[0] == (OTHER, [PLACE])


def test_a_name_that_is_taken_already_keeps_nobody_from_being_found() -> None:
    taken = ServiceInfo(
        SERVICE,
        f"{OTHER}.{SERVICE}",
        port=9,
        parsed_addresses=["127.0.0.1"],
        properties={"network": "n", "peer": "somebody"},
        server="somebody.local.",
    )

    async def main() -> None:
        seen = trio.Event()

        def found(peer: PeerId, addresses: Sequence[str]) -> None:
            if (peer, addresses) == (OTHER, [PLACE]):
                seen.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(discovery(ME, found).run, [])
            nursery.start_soon(discovery(OTHER).run, [PLACE])
            with trio.fail_after(10):
                await seen.wait()
            nursery.cancel_scope.cancel()

    somebody = Zeroconf(interfaces=["127.0.0.1"])
    try:
        somebody.register_service(taken, cooperating_responders=True)
        trio.run(main)
    finally:
        somebody.close()
