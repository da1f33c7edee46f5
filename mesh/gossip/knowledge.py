"""What this node knows, and the one way in: everything is verified, then applied to the table.

No I/O and no tasks: whoever owns it is told of the effects and of every change.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import trio

from ca.certificate import Certificate, CertificateError
from mesh.gossip import events, membership
from mesh.gossip.advert import AdvertError, SignedAdvert, in_time, open_advert, open_load
from mesh.gossip.anti_entropy import Record
from mesh.gossip.events import Effect, Event
from mesh.gossip.exchange import AliveAnswer, is_proof
from mesh.gossip.membership import Table
from mesh.identity import PeerId, TrustStore, public_key_of

logger = logging.getLogger(__name__)


class Knowledge:
    """The membership table with its clocks: monotonic for silence, epoch for certificates."""

    def __init__(
        self,
        table: Table,
        trust: TrustStore,
        *,
        on_effect: Callable[[Effect], None],
        on_change: Callable[[], None],
    ) -> None:
        self.table = table
        self._trust = trust
        self._on_effect = on_effect
        self._on_change = on_change

    def apply(self, event: Event) -> None:
        before = self.table
        self.table, effects = membership.apply(before, event, trio.current_time())
        for effect in effects:
            self._on_effect(effect)
        if self.table is not before:
            self._on_change()

    def take_advert(self, envelope: bytes, age: float = 0.0, author: str | None = None) -> bool:
        """Verify an advert and take it in. False when it is not worth passing on.

        ``author``: who must have signed it, where that is known from elsewhere.
        """
        try:
            signed = open_advert(envelope, self._verify)
        except AdvertError as error:
            logger.info("advert refused: %s", error)
            return False
        if author is not None and signed.peer != author:
            logger.info("advert refused: %s passes off one of %s as its own", author, signed.peer)
            return False
        known = self.table.entries.get(signed.peer)
        if known is not None and signed.version < known.signed.version:
            return False
        self.apply(events.AdvertHeard(_believed(signed), age, self._expiry(signed)))
        return True

    def take_load(self, author: PeerId, envelope: bytes) -> bool:
        """The same for a load report."""
        known = self.table.entries.get(author)
        if known is None:
            return False  # its advert comes first
        try:
            report = open_load(envelope, known.signed.certificate)
        except AdvertError as error:
            logger.info("load report refused: %s", error)
            return False
        if (report.boot, report.sequence) <= (known.boot, known.sequence):
            return False
        self.apply(events.LoadHeard(author, report))
        return True

    async def take_records(self, records: Iterable[Record]) -> None:
        """Adverts that a peer passed on; checking many takes a while, so others get their turn."""
        for record in records:
            self.take_advert(record.envelope, record.age)
            await trio.lowlevel.checkpoint()

    def take_proof(self, peer: PeerId, nonce: bytes, answer: AliveAnswer) -> bool:
        """Whether ``answer`` is the proof of life of ``peer``, wherever it came from."""
        if not is_proof(answer, nonce, public_key_of(peer)):
            logger.info("a proof of life of %s is not signed by it", peer)
            return False
        self.apply(events.ProofOfLife(peer, answer.boot))
        return True

    def recheck(self, reason: str) -> None:
        """Drop every peer whose certificate does not hold any more."""
        refused = set()
        for peer, entry in self.table.entries.items():
            if entry.status != "gone" and peer != self.table.me:
                try:
                    self._verify(entry.signed.certificate.chain_der)
                except CertificateError:
                    refused.add(peer)
        if refused:
            self.apply(events.Refused(frozenset(refused), reason))

    def _verify(self, chain_der: tuple[bytes, ...]) -> Certificate:
        return self._trust.verify(chain_der, time.time())

    def _expiry(self, signed: SignedAdvert) -> float:
        left = signed.certificate.not_after.timestamp() - time.time()
        return trio.current_time() + left


def _believed(signed: SignedAdvert) -> SignedAdvert:
    """What to believe of an advert; it is passed on as its author signed it."""
    wants = in_time(signed.advert.wants, time.time())
    if len(wants) == len(signed.advert.wants):
        return signed
    logger.info("%s wants models as of a time that is not yet", signed.peer)
    return replace(signed, advert=signed.advert.model_copy(update={"wants": wants}))
