"""Gossip: messages to everybody, signed by their author, over py-libp2p's GossipSub.

Defaults of the library that do not fit are replaced: a heartbeat of 120 s, a spam guard that drops
the node's own messages above ten a second, and queues that lose messages of a slow subscriber after
32. Peers enter gossip only with an admitted connection, and leave it when their last one closes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pb.rpc_pb2 import RPC
from libp2p.pubsub.pubsub import Pubsub
from libp2p.pubsub.pubsub_notifee import PubsubNotifee
from libp2p.tools.anyio_service import background_trio_service

from mesh.identity import PeerId

logger = logging.getLogger(__name__)

Validator = Callable[[PeerId, bytes], bool]

MAX_MESSAGE = 64 << 10  # bytes of one message; adverts are 4 KB
_LOOK_AGAIN = (1.0, 3.0, 10.0, 30.0)  # seconds between looks whether a peer is in
_SETTLE = 2.0  # seconds after a link was lost
_QUEUE = 1024  # messages that wait for a subscriber of ours


class _Members(PubsubNotifee):
    """Tells Pubsub of peers, not of connections: a peer with a second one is still there."""

    def __init__(self, notifee: PubsubNotifee, enter_again: Callable[[ID], None]) -> None:
        super().__init__(notifee.initiator_peers_queue, notifee.dead_peers_queue)
        self._enter_again = enter_again

    async def connected(self, network: Any, conn: Any) -> None:
        if len(network.get_connections(conn.muxed_conn.peer_id)) <= 1:
            await super().connected(network, conn)

    async def disconnected(self, network: Any, conn: Any) -> None:
        await super().disconnected(network, conn)
        if network.get_connections(conn.muxed_conn.peer_id):
            self._enter_again(conn.muxed_conn.peer_id)


class Topics:
    """Publish and subscribe. Run it in :meth:`running`."""

    def __init__(self, host: Any) -> None:
        router = GossipSub(
            protocols=[TProtocol("/meshsub/1.1.0")],
            degree=6,
            degree_low=4,
            degree_high=12,
            heartbeat_interval=1,
            spam_protection_enabled=False,
        )
        self._pubsub = Pubsub(
            host, router, strict_signing=True, max_inbound_rpc_size=4 * MAX_MESSAGE
        )
        # It numbers messages from the seconds since 1970, and those who remember the numbers drop
        # what has one for the second time: all that a node says at first that starts again after
        # more messages than seconds. (0.8.1 does; this can go when it begins with nanoseconds.)
        self._pubsub.counter = time.time_ns()
        self._router = router
        self._enter = self._pubsub._handle_new_peer
        self._entering: dict[ID, trio.Lock] = {}
        self._pubsub._handle_new_peer = self._enter_once
        self._leave = self._pubsub._handle_dead_peer
        self._pubsub._handle_dead_peer = self._leave_if_gone
        self._take = self._pubsub.push_msg
        self._pubsub.push_msg = self._take_contained
        self._network = host.get_network()
        for notifee in list(self._network.notifees):
            if type(notifee) is PubsubNotifee:
                self._network.remove_notifee(notifee)
                self._network.register_notifee(_Members(notifee, self._enter_again))
        self._subscribers: dict[str, list[trio.MemorySendChannel[tuple[PeerId, bytes]]]] = {}
        self._nursery: trio.Nursery | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with background_trio_service(self._pubsub), background_trio_service(self._router):
            await self._pubsub.wait_until_ready()
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                yield
                nursery.cancel_scope.cancel()

    async def ensure(self, peer: PeerId, gone: Callable[[], Awaitable[None]]) -> None:
        """See to it that a linked peer takes part in gossip, until ``gone`` returns.

        The library tries once when the peer connects, and gives up for good when the stream cannot
        be negotiated in that moment.
        """
        member = ID.from_string(peer)
        for wait in _LOOK_AGAIN:
            with trio.move_on_after(wait):
                await gone()
                return
            self._enter_again(member)

    def _enter_again(self, peer: ID) -> None:
        """Enter a connected peer whose stream has not come up, or was on a connection that is
        closed now: it may have started again, or its link may have moved, and have another."""
        stream = self._pubsub.peers.get(peer)
        if stream is None or stream.muxed_conn.is_closed:
            self._pubsub._handle_dead_peer(peer)

    def _leave_if_gone(self, peer: ID) -> None:
        """What a peer that is still connected has subscribed to stays: it has said so on a stream
        of its own, which may be younger than the one that broke, and says it once."""
        topics = [topic for topic, peers in self._pubsub.peer_topics.items() if peer in peers]
        self._leave(peer)
        if self._pubsub._peer_is_connected(peer):
            for topic in topics:
                subscription = RPC.SubOpts(subscribe=True, topicid=topic)
                self._pubsub.handle_subscription(peer, subscription)

    async def _enter_once(self, peer: ID) -> None:
        """Enter a peer, one attempt at a time: two at once would both succeed, and the task and
        queue of the first would stay behind for ever."""
        lock = self._entering.setdefault(peer, trio.Lock())
        try:
            async with lock:
                await self._enter(peer)
        finally:
            if not lock.locked():
                self._entering.pop(peer, None)

    async def _take_contained(self, forwarder: ID, message: Any) -> None:
        """An error in a task of the library's would end gossip, and the node with it."""
        try:
            await self._take(forwarder, message)
        except Exception as error:
            logger.warning("a gossip message that came from %s is dropped: %r", forwarder, error)

    async def clear(self, peer: PeerId) -> None:
        """See to it that a peer without a connection is out of gossip.

        When a peer comes and goes quickly the library may enter it after it has left.
        """
        await trio.sleep(_SETTLE)
        member = ID.from_string(peer)
        if member in self._pubsub.peers and not self._network.get_connections(member):
            self._pubsub._handle_dead_peer(member)

    async def publish(self, topic: str, data: bytes) -> None:
        """Send to all subscribers of ``topic``. Raises ValueError when it is too large."""
        if len(data) > MAX_MESSAGE:
            raise ValueError(f"a gossip message of {len(data)} bytes; the limit is {MAX_MESSAGE}")
        await self._pubsub.publish(topic, data)

    @asynccontextmanager
    async def subscribe(
        self, topic: str, validator: Validator
    ) -> AsyncIterator[AsyncIterator[tuple[PeerId, bytes]]]:
        """Messages of ``topic`` with their authors, our own left out.

        ``validator`` decides on each before it is passed on to anybody; a topic has one, set by its
        latest subscription. A reader that falls more than 1024 messages behind loses new ones.
        """
        if self._nursery is None:
            raise RuntimeError("gossip is not running")
        send, receive = trio.open_memory_channel[tuple[PeerId, bytes]](_QUEUE)
        self._pubsub.set_topic_validator(topic, self._checked(validator), False)
        readers = self._subscribers.get(topic)
        if readers is None:
            readers = self._subscribers[topic] = []
            subscription = await self._pubsub.subscribe(topic)
            self._nursery.start_soon(self._spread, subscription, readers)
        readers.append(send)
        try:
            async with receive:
                yield receive
        finally:
            readers.remove(send)
            send.close()

    async def _spread(self, subscription: Any, readers: list[Any]) -> None:
        """Hand each message to all readers at once, so that the library's queue never fills."""
        own = self._pubsub.my_id.to_bytes()
        while True:
            message = await subscription.get()
            if message.from_id == own:
                continue
            item = PeerId(ID(message.from_id).to_base58()), bytes(message.data)
            for reader in readers:
                try:
                    reader.send_nowait(item)
                except (trio.WouldBlock, trio.BrokenResourceError):
                    logger.warning("a subscriber is too slow and loses gossip messages")

    def _checked(self, validator: Validator) -> Callable[[ID, Any], bool]:
        own = self._pubsub.my_id.to_bytes()

        def check(forwarder: ID, message: Any) -> bool:
            if len(message.data) > MAX_MESSAGE:
                return False
            if message.from_id == own:
                return bool(forwarder.to_bytes() == own)
            try:
                author = PeerId(ID(message.from_id).to_base58())
                return validator(author, bytes(message.data))
            except Exception:
                logger.exception("a gossip validator failed")
                return False

        return check
