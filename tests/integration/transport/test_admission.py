"""Who is not admitted gets nothing: no protocol, no gossip, and no connection that stays."""

from __future__ import annotations

import ssl
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import ConnectionTerminated, HandshakeCompleted, StreamDataReceived
from libp2p import new_host
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.transport.quic.config import QUICTransportConfig
from libp2p.transport.quic.security import create_quic_security_transport
from multiaddr import Multiaddr

from mesh.identity import Identity
from mesh.transport import (
    DialError,
    Message,
    NotAdmitted,
    Request,
    Transport,
    TransportConfig,
    TransportError,
)
from mesh.transport.host import key_pair_of
from mesh.transport.quic.connection import REFUSED

LOOPBACK = "/ip4/127.0.0.1/udp/0/quic-v1"


class TrustsAnybody:
    """The trust store of a liar: it checks nothing, so only the other side can refuse."""

    network = "testnet"

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def verify_peer(self, chain: Sequence[bytes] | None, peer: str, now: float) -> Any:
        return replace(self._identity.certificate, peer_id=peer)

    def on_revocation(self, listener: Any) -> Any:
        return lambda: None


@asynccontextmanager
async def liar(identity: Identity) -> AsyncIterator[Transport]:
    trust: Any = TrustsAnybody(identity)
    async with Transport.open(TransportConfig(listen=(LOOPBACK,)), identity, trust) as transport:
        yield transport


def without_certificate(identity: Identity) -> Identity:
    return replace(identity, certificate=replace(identity.certificate, chain_der=()))


def bad_identities(network: Any, make_authority: Any) -> dict[str, Identity]:
    good = network.identity("good")
    other = make_authority("testnet", name="another ca")
    stolen = network.identity("victim")
    return {
        "no certificate": without_certificate(good),
        "another CA": other.identity("mallory"),
        "another network": make_authority("elsewhere").identity("mallory"),
        "expired": network.identity("old", now=time.time() - 40 * 86_400),
        "somebody else's certificate": replace(
            good, certificate=replace(stolen.certificate, peer_id=good.peer_id)
        ),
    }


@pytest.mark.parametrize(
    "case",
    [
        "no certificate",
        "another CA",
        "another network",
        "expired",
        "somebody else's certificate",
    ],
)
def test_bad_certificate_is_refused_in_both_directions(
    network: Any, make_authority: Any, case: str
) -> None:
    identity = bad_identities(network, make_authority)[case]

    async def main() -> None:
        async with network.open("a") as a, liar(identity) as mallory:
            asked = []

            async def secret(request: Request) -> Message:
                asked.append(request.peer)
                return Message("secret")

            a.serve("secret", secret)
            began = trio.current_time()
            with pytest.raises(TransportError):
                link = await mallory.connect(a.addresses[0])
                await link.request("secret")
            with pytest.raises(NotAdmitted):
                await a.connect(mallory.addresses[0])
            assert trio.current_time() - began < 10
            await trio.sleep(0.2)
            assert not a.links
            assert not asked
            assert not a._quic.endpoint.connections
            assert not a._host.get_network().connections
            assert not a._topics._pubsub.peers

    trio.run(main)


def test_stock_libp2p_is_refused(network: Any) -> None:
    async def main() -> None:
        async with network.open("a") as a:
            host = new_host(
                enable_quic=True,
                quic_transport_opt=QUICTransportConfig(min_connections=0, low_watermark=0),
            )
            async with host.run([Multiaddr(LOOPBACK)]):
                address, _, peer = a.addresses[0].partition("/p2p/")
                with pytest.raises(Exception), trio.fail_after(10):  # noqa: B017
                    await host.get_network().dial_addr(Multiaddr(address), ID.from_string(peer))
                    await host.new_stream(ID.from_string(peer), [TProtocol("/ipfs/ping/1.0.0")])
                    raise ConnectionError
                await trio.sleep(0.2)
                assert not a._host.get_network().connections
                await host.close()

    trio.run(main)


def test_request_behind_the_handshake_is_never_read(network: Any) -> None:
    """A client that sends its request in the same flight as the end of its handshake must not be
    answered, however fast it is."""

    def attack(port: int, identity: Identity) -> tuple[bytes, int]:
        """What it got before it was shut out, and the code that it was shut out with."""
        import socket

        keys = key_pair_of(identity.key)
        tls = create_quic_security_transport(
            keys.private_key, ID.from_pubkey(keys.public_key)
        ).tls_config
        configuration = QuicConfiguration(
            is_client=True, alpn_protocols=["libp2p"], verify_mode=ssl.CERT_NONE
        )
        configuration.certificate, configuration.private_key = tls.certificate, tls.private_key
        engine = QuicConnection(configuration=configuration)
        got = b""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.settimeout(0.05)
            engine.connect(("127.0.0.1", port), now=time.monotonic())
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                for data, address in engine.datagrams_to_send(now=time.monotonic()):
                    udp.sendto(data, address)
                try:
                    data, address = udp.recvfrom(65536)
                    engine.receive_datagram(data, address, now=time.monotonic())
                except TimeoutError:
                    timer = engine.get_timer()
                    if timer is not None and timer <= time.monotonic():
                        engine.handle_timer(time.monotonic())
                while (event := engine.next_event()) is not None:
                    if isinstance(event, HandshakeCompleted):
                        engine.send_stream_data(0, b"\x13/multistream/1.0.0\n\x10/ipfs/id/1.0.0\n")
                    elif isinstance(event, StreamDataReceived):
                        got += event.data
                    elif isinstance(event, ConnectionTerminated):
                        return got, event.error_code
        raise AssertionError("it is not shut out")

    async def main() -> None:
        async with network.open("a") as a:
            port = int(a.addresses[0].split("/")[4])
            for attempt in range(3):
                identity = network.identity(f"mallory-{attempt}")
                shut_out = await trio.to_thread.run_sync(attack, port, identity)
                assert shut_out == (b"", REFUSED)
            assert not a._quic.endpoint.connections

    trio.run(main)


def test_revoked_peer_loses_its_link_at_once(network: Any) -> None:
    async def main() -> None:
        revoked: set[str] = set()
        trust = network.trust("a")
        verify = trust.verify_peer

        def verify_peer(chain: Any, peer: str, now: float) -> Any:
            if peer in revoked:
                return verify(None, peer, now)
            return verify(chain, peer, now)

        trust.verify_peer = verify_peer
        async with network.open("a", trust=trust) as a, network.open("b") as b:
            link = await b.connect(a.addresses[0])
            revoked.add(b.peer_id)
            a.recheck(time.time())
            assert not a.links
            with trio.fail_after(2):
                await link.wait_down()
            with pytest.raises(NotAdmitted):
                await b.connect(a.addresses[0])
            with pytest.raises(DialError):
                await b.connect(a.addresses[0].replace("/udp/", "/udp/1"))

    trio.run(main)


def test_renewed_certificate_reaches_peers_without_a_new_link(network: Any) -> None:
    async def main() -> None:
        old = network.identity("a", days=1)
        async with network.open("a", identity=old) as a, network.open("b") as b:
            link = await b.connect(a.addresses[0])
            assert link.certificate.not_after == old.certificate.not_after
            renewed = network.identity("a", days=20)
            a.renew(renewed.certificate)
            with trio.fail_after(10):
                while link.certificate.not_after == old.certificate.not_after:  # noqa: ASYNC110
                    await trio.sleep(0.01)
            assert link.is_up
            assert link.certificate.not_after == renewed.certificate.not_after
            link.down("again")
            again = await b.connect(a.addresses[0])
            assert again.certificate.not_after == renewed.certificate.not_after

    trio.run(main)


def test_address_is_proven_when_many_handshakes_are_under_way(
    network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.transport.quic.endpoint._HANDSHAKES_ON_TRUST", 0)

    async def main() -> None:
        async with network.open("a") as a, network.open("b") as b:
            retries = []
            prove = b._quic.endpoint._prove_address

            def count(*arguments: Any) -> Any:
                retries.append(prove(*arguments))
                return retries[-1]

            b._quic.endpoint._prove_address = count
            link = await a.connect(b.addresses[0])
            assert link.is_up
            assert retries[0] is None
            assert retries[1] is not None

    trio.run(main)


def test_handshake_that_does_not_end_is_ended(
    network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.transport.quic.connection._HANDSHAKE", 2.0)

    async def main() -> None:
        async with network.open("a") as a, network.open("b") as b:
            endpoint = a._quic.endpoint
            host, port = "127.0.0.1", int(b.addresses[0].split("/")[4])
            connection = endpoint.dial(host, port, ID.from_string(b.peer_id))
            endpoint.forget(connection)  # the client goes silent after its first packet
            with trio.fail_after(20):
                while not b._quic.endpoint.connections:  # noqa: ASYNC110
                    await trio.sleep(0.01)
                [under_way] = b._quic.endpoint.connections
                while b._quic.endpoint.connections:  # noqa: ASYNC110
                    await trio.sleep(0.01)
            assert under_way.close_reason == "the handshake took too long"

    trio.run(main)
