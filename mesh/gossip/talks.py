"""Talking to single peers: anti-entropy, probes, dialling, and answering all of these."""

from __future__ import annotations

import logging
import random
import secrets
from collections.abc import Awaitable, Callable, Iterable

import trio

from ca.certificate import CertificateError
from mesh.gossip import anti_entropy, exchange, revocation
from mesh.gossip.checking import ANSWER_TIME
from mesh.gossip.events import NoAnswer, ProofOfLife, Unreachable
from mesh.gossip.exchange import (
    AliveAnswer,
    AliveCall,
    ProbeCall,
    SyncAnswer,
    SyncCall,
    decode_transfer,
    encode_transfer,
    parse,
)
from mesh.gossip.knowledge import Knowledge
from mesh.gossip.membership import PROBE_TIME
from mesh.gossip.wire import WireError
from mesh.identity import Identity, PeerId, TrustStore
from mesh.transport import Lane, Link, Message, RemoteError, Request, Transport, TransportError

logger = logging.getLogger(__name__)

SYNC_TIMEOUT = 10.0  # s
DIAL_TIMEOUT = 10.0  # s
MOST_ROUNDS = 4  # transfers of 4 MiB in a row: more than adverts of MAX_NODES
FETCH_GAP = 1.0  # s between attempts to get one peer's advert
HELPERS = 3  # peers that are asked about a suspect
PROBES_AT_ONCE = 16  # each dials, and most of those who are suspected at once are out of reach
SYNCS_AT_ONCE = 2  # so that a newcomer gets the whole view once or twice, not over each new link
NO_LINK = "no_link"


class Talks:
    """All of it for one node. ``boot`` gives the node's present boot; ``refresh`` is called before
    its own advert is compared with what a peer has, and may sign a newer one."""

    def __init__(
        self,
        transport: Transport,
        identity: Identity,
        trust: TrustStore,
        knowledge: Knowledge,
        *,
        boot: Callable[[], int],
        refresh: Callable[[], None],
        rng: random.Random,
    ) -> None:
        self._transport = transport
        self.identity = identity
        self._trust = trust
        self._knowledge = knowledge
        self._boot = boot
        self._refresh = refresh
        self._rng = rng
        self._syncing: set[PeerId] = set()  # under way or waiting for their turn
        self._syncs = trio.CapacityLimiter(SYNCS_AT_ONCE)
        self._probes = trio.CapacityLimiter(PROBES_AT_ONCE)
        self._fetched: dict[PeerId, float] = {}

    def serve(self) -> None:
        """Register the handlers."""
        self._transport.serve(exchange.SYNC, _checked(self._answer_sync))
        self._transport.serve(exchange.PUSH, _checked(self._answer_push))
        self._transport.serve(exchange.ALIVE, _checked(self._answer_alive))
        self._transport.serve(exchange.PROBE, _checked(self._answer_probe))

    def some_links(self, count: int, without: PeerId | None = None) -> list[Link]:
        """Links to randomly chosen peers that are alive."""
        entries = self._knowledge.table.entries
        alive = [
            link
            for peer, link in sorted(self._transport.links.items())
            if peer != without and (peer not in entries or entries[peer].status == "alive")
        ]
        return self._rng.sample(alive, min(count, len(alive)))

    # -- anti-entropy -------------------------------------------------------------------------

    async def sync(self, link: Link) -> None:
        """One round with a peer: afterwards both know what either knew."""
        if link.peer in self._syncing:
            return
        self._syncing.add(link.peer)
        try:
            async with self._syncs:
                for _ in range(MOST_ROUNDS):
                    if not await self._sync(link):
                        break
        except (TransportError, WireError) as error:
            logger.info("anti-entropy with %s failed: %s", link.peer, error)
        finally:
            self._syncing.discard(link.peer)

    async def _sync(self, link: Link) -> bool:
        """One question and answer; whether there is more to get."""
        self._refresh()
        lists = revocation.numbers(self._trust.revocation_lists)
        call = SyncCall(boot=self._boot(), lists=lists)
        reply = await link.request(
            exchange.SYNC,
            call.model_dump(),
            anti_entropy.digest(self._knowledge.table),
            lane=Lane.BULK,
            timeout=SYNC_TIMEOUT,
        )
        answer = parse(SyncAnswer, reply.body)
        wanted = anti_entropy.parse_wanted(answer.want)
        theirs = revocation.parse_numbers(answer.lists)
        await self._take(reply.payload)
        self._knowledge.apply(ProofOfLife(link.peer, answer.boot))
        records = anti_entropy.wanted(self._knowledge.table, wanted, trio.current_time())
        await self.push(link, records, revocation.newer_than(theirs, self._trust.revocation_lists))
        return answer.more

    async def push(
        self, link: Link, records: Iterable[anti_entropy.Record], lists: Iterable[bytes] = ()
    ) -> None:
        """Give a peer what it lacks. Raises TransportError."""
        sent, newer = tuple(records), tuple(lists)
        if sent or newer:
            payload = encode_transfer(sent, newer)
            await link.request(exchange.PUSH, None, payload, lane=Lane.BULK, timeout=SYNC_TIMEOUT)

    async def _answer_sync(self, request: Request) -> Message:
        call = parse(SyncCall, request.message.body)
        self._refresh()
        theirs = anti_entropy.parse_digest(bytes(request.message.payload))
        lists = self._trust.revocation_lists
        newer = revocation.newer_than(revocation.parse_numbers(call.lists), lists)
        diff = anti_entropy.compare(self._knowledge.table, theirs, trio.current_time())
        self._knowledge.apply(ProofOfLife(request.peer, call.boot))
        answer = SyncAnswer(
            boot=self._boot(),
            lists=revocation.numbers(lists),
            want=b"".join(diff.want),
            more=diff.more,
        )
        return Message(answer.model_dump(), encode_transfer(diff.send, newer))

    async def _answer_push(self, request: Request) -> Message:
        await self._take(request.message.payload)
        return Message()

    async def _take(self, payload: bytes | bytearray | memoryview) -> None:
        transfer = decode_transfer(payload)
        for der in transfer.lists:
            try:
                self._trust.apply_crl(der)
            except CertificateError as error:
                logger.warning("revocation list refused: %s", error)
        await self._knowledge.take_records(transfer.records)

    def fetch(self, peer: PeerId) -> Link | None:
        """Whom to ask for an advert of ``peer``, or None if that was done a moment ago."""
        now = trio.current_time()
        self._fetched = {p: at for p, at in self._fetched.items() if now - at < FETCH_GAP}
        if peer in self._fetched:
            return None
        self._fetched[peer] = now
        return self._transport.link(peer) or next(iter(self.some_links(1)), None)

    # -- proof of life ------------------------------------------------------------------------

    async def check(self, peer: PeerId) -> None:
        """Ask a peer over its link whether it is there; without an answer it is suspect."""
        link = self._transport.link(peer)
        if link is None:
            return
        nonce = secrets.token_bytes(exchange.NONCE_BYTES)
        try:
            reply = await link.request(
                exchange.ALIVE, AliveCall(nonce=nonce).model_dump(), timeout=ANSWER_TIME
            )
            if self._knowledge.take_proof(peer, nonce, parse(AliveAnswer, reply.body)):
                return
        except (TransportError, WireError) as error:
            logger.info("%s does not answer: %s", peer, error)
        self._knowledge.apply(NoAnswer(peer))

    async def probe(self, peer: PeerId) -> None:
        """Look for a proof that ``peer``, a suspect, lives: directly and through others at once."""
        nonce = secrets.token_bytes(exchange.NONCE_BYTES)
        with trio.move_on_after(PROBE_TIME):
            async with self._probes, trio.open_nursery() as nursery:
                entry = self._knowledge.table.entries.get(peer)
                if entry is None or entry.status != "suspect":
                    return  # that was settled while others were probed

                async def ask(link: Link, kind: str, call: AliveCall | ProbeCall) -> None:
                    try:
                        reply = await link.request(kind, call.model_dump(), timeout=PROBE_TIME)
                        answer = parse(AliveAnswer, reply.body)
                    except (TransportError, WireError) as error:
                        logger.debug("probe of %s over %s: %s", peer, link.peer, error)
                        return
                    if self._knowledge.take_proof(peer, nonce, answer):
                        nursery.cancel_scope.cancel()

                async def ask_directly() -> None:
                    link = await self._link_to(peer)
                    if link is not None:
                        await ask(link, exchange.ALIVE, AliveCall(nonce=nonce))

                nursery.start_soon(ask_directly)
                for helper in self.some_links(HELPERS, without=peer):
                    call = ProbeCall(peer=peer, nonce=nonce)
                    nursery.start_soon(ask, helper, exchange.PROBE, call)

    async def _answer_alive(self, request: Request) -> Message:
        call = parse(AliveCall, request.message.body)
        answer = exchange.prove_alive(self.identity, call.nonce, self._boot())
        return Message(answer.model_dump())

    async def _answer_probe(self, request: Request) -> Message:
        """Only over a link that is there: a probe must not make this node dial."""
        call = parse(ProbeCall, request.message.body)
        link = self._transport.link(PeerId(call.peer))
        if link is None:
            raise RemoteError(NO_LINK, "this node has no link to that peer")
        try:
            reply = await link.request(
                exchange.ALIVE, AliveCall(nonce=call.nonce).model_dump(), timeout=PROBE_TIME
            )
        except TransportError as error:
            raise RemoteError(NO_LINK, "that peer does not answer") from error
        return Message(parse(AliveAnswer, reply.body).model_dump())

    # -- links --------------------------------------------------------------------------------

    async def dial(self, peer: PeerId) -> None:
        """Open a link. A failure makes the peer suspect; the transport goes on trying."""
        if await self._link_to(peer) is None:
            self._knowledge.apply(Unreachable(peer))
            entry = self._knowledge.table.entries.get(peer)
            if entry is not None:
                self._transport.keep(peer, entry.signed.advert.addresses)

    async def _link_to(self, peer: PeerId) -> Link | None:
        link = self._transport.link(peer)
        entry = self._knowledge.table.entries.get(peer)
        if link is not None or entry is None:
            return link
        try:
            with trio.fail_after(DIAL_TIMEOUT):
                return await self._transport.link_to(peer, list(entry.signed.advert.addresses))
        except (TransportError, trio.TooSlowError) as error:
            logger.info("no link to %s (%s): %s", entry.signed.certificate.name, peer, error)
            return None


def _checked(
    handler: Callable[[Request], Awaitable[Message]],
) -> Callable[[Request], Awaitable[Message]]:
    """``handler``, with what is wrong in the request said to the caller."""

    async def checked(request: Request) -> Message:
        try:
            return await handler(request)
        except WireError as error:
            raise RemoteError("malformed", str(error)) from error

    return checked
