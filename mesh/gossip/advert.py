"""Adverts and load reports: what they say, how they are signed, checked and kept small.

An advert travels in an envelope with its author's certificate chain, so that whoever gets it from a
third node can check it. A load report is small and frequent: it carries no chain, and only makes
sense to a node that already holds an advert of the same boot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError, model_validator

from ca.certificate import MAX_CHAIN, SKEW, Certificate, CertificateError
from mesh.gossip.wire import WIRE, Digest, Frozen, Listed, Row, WireError, decode, encode
from mesh.identity import Identity, PeerId, SignatureError, verify_signature

ADVERT_TAG = b"meshnode-advert-v1"
LOAD_TAG = b"meshnode-load-v1"

MAX_ADVERT = 4096  # bytes of an envelope, certificate chain included
MAX_LOAD = 2048  # bytes of a load report's envelope
MAX_HOLDINGS = 64
MAX_WANTS = 8
MAX_SPEEDS = 8
MAX_LINKS = 16  # a node tells of its nearest peers and of those that it found wanting

Boot = Annotated[int, Field(ge=1, lt=1 << 63)]
Sequence32 = Annotated[int, Field(ge=1, lt=1 << 32)]
HoldingId = Annotated[int, Field(ge=0, lt=1 << 16)]
Layer = Annotated[int, Field(ge=0, le=4096)]
# The longest silence that an author may announce.
Beat = Annotated[float, Field(ge=0.1, le=60.0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0.0, le=3600.0, allow_inf_nan=False)]
ModelName = Annotated[str, Field(min_length=1, max_length=128)]
DeviceName = Annotated[str, Field(min_length=1, max_length=32)]


class AdvertError(Exception):
    """An advert or load report that is malformed, not signed by whom it names, or not admitted."""


class AdvertTooLarge(Exception):
    """What a node has to say does not fit even after everything optional was left out."""


class Device(Row):
    """An OpenVINO device. Memory in bytes; None where the driver does not say.

    ``offered`` is what placement may fill there in all, what it has loaded already included; None
    where it may load nothing. The rates say how fast it works through weights, for estimates of
    models that were not measured here: bytes per second in a step of one session, and bytes times
    prompt tokens per second; None where it was not tried.
    """

    name: DeviceName  # as OpenVINO calls it: CPU, GPU.0, NPU
    full_name: str = Field("", max_length=80)
    total_memory: int | None = Field(None, ge=0, lt=1 << 50)
    free_memory: int | None = Field(None, ge=0, lt=1 << 50)
    offered: int | None = Field(None, ge=0, lt=1 << 50)
    decode_rate: int | None = Field(None, ge=1, lt=1 << 50)
    prefill_rate: int | None = Field(None, ge=1, lt=1 << 60)


class Holding(Row):
    """A model, or some of its layers, loaded on one device of the author.

    ``id`` is the author's own number for it, not reused within a boot; load reports refer to it.
    Speeds are measured on this holding alone: ``prefill_seconds`` per prompt token,
    ``decode_seconds`` per step of a single session; None while unknown.

    ``claim`` is the sequence of the claim by which placement has put it here, None where the user
    has typed it. It counts for requests when it is ``ready``; one that drains is so no more.
    """

    id: HoldingId
    model: ModelName
    digest: Digest
    kind: Literal["replica", "stage"]
    first: Layer
    last: Layer
    layers: Annotated[int, Field(ge=1, le=4096)]  # of the whole model
    context_length: int = Field(ge=1, lt=1 << 31)  # tokens
    device: DeviceName
    ready: bool  # False while it loads
    slots: int = Field(ge=1, le=4096)  # sessions it runs at once
    queue: int = Field(ge=0, le=65536)  # requests that may wait for a slot
    prefill_seconds: Seconds | None = None
    decode_seconds: Seconds | None = None
    claim: int | None = Field(None, ge=1, lt=1 << 32)

    @model_validator(mode="after")
    def _range(self) -> Holding:
        if not self.first < self.last <= self.layers:
            raise ValueError("a holding covers layers [first, last) within [0, layers)")
        if self.kind == "replica" and (self.first, self.last) != (0, self.layers):
            raise ValueError("a replica holds every layer")
        return self


class HoldingLoad(Row):
    """How busy a holding is: sessions running, requests waiting, tokens that its KV still takes."""

    id: HoldingId
    active: int = Field(ge=0, le=1 << 16)
    waiting: int = Field(ge=0, le=1 << 20)
    free_kv: int | None = Field(None, ge=0, lt=1 << 40)


class StoredModel(Row):
    """A whole model in the author's store, loaded or not."""

    name: ModelName
    digest: Digest


class Wanted(Row):
    """A model that the mesh is to serve, with all that placing its layers needs. Sizes in bytes.

    The newest ``version`` for a name counts (milliseconds since 1970, then PeerId of the
    publisher); ``replicas`` 0 withdraws it. Those who hold some of the model repeat it in their
    adverts, so that it outlives its publisher. ``shared_bytes``: of embedding and head, where one
    stage has both. ``kv_bytes``: of one token in one layer. Memory is reserved for ``sessions`` of
    ``context`` tokens.
    """

    name: ModelName
    digest: Digest
    version: int = Field(ge=1, lt=1 << 63)
    publisher: str = Field(min_length=1, max_length=128)
    layers: Annotated[int, Field(ge=1, le=4096)]
    layer_bytes: int = Field(ge=1, lt=1 << 45)
    embedding_bytes: int = Field(ge=0, lt=1 << 45)
    head_bytes: int = Field(ge=0, lt=1 << 45)
    shared_bytes: int = Field(ge=0, lt=1 << 45)
    kv_bytes: int = Field(ge=1, lt=1 << 32)
    hidden: int = Field(ge=1, le=1 << 20)
    context_length: int = Field(ge=1, lt=1 << 31)
    replicas: int | None = Field(None, ge=0, le=4096)
    max_nodes: int | None = Field(None, ge=1, le=4096)
    context: int = Field(4096, ge=1, lt=1 << 31)
    sessions: int = Field(4, ge=1, le=4096)

    @model_validator(mode="after")
    def _ends(self) -> Wanted:
        if self.shared_bytes > min(self.embedding_bytes, self.head_bytes):
            raise ValueError("more is shared than there is")
        return self


def in_time(wants: Sequence[Wanted], now: float) -> tuple[Wanted, ...]:
    """Without those of a version that no clock can have given by ``now`` (seconds since 1970): the
    newest counts, so one from the far future would count for ever."""
    latest = (now + SKEW) * 1000
    return tuple(wanted for wanted in wants if wanted.version <= latest)


class MeasuredSpeed(Row):
    """Seconds per layer of a model on a device of the author, per prompt token and per step."""

    digest: Digest
    device: DeviceName
    prefill: Seconds
    decode: Seconds


class SeenLink(Row):
    """What the author measured to a peer, named by its key in digests (see ``anti_entropy``).

    Times in tenths of a millisecond, loss in thousandths, bandwidth in kilobytes per second; None
    where it does not know. ``state``: 0 admitted, 1 quarantined, 2 rejected.
    """

    key: bytes = Field(min_length=8, max_length=8)
    rtt: int | None = Field(None, ge=0, lt=1 << 24)
    jitter: int | None = Field(None, ge=0, lt=1 << 24)
    loss: int | None = Field(None, ge=0, le=1000)
    upload: int | None = Field(None, ge=0, lt=1 << 32)
    download: int | None = Field(None, ge=0, lt=1 << 32)
    state: int = Field(0, ge=0, le=2)


Loads = Annotated[tuple[HoldingLoad, ...], Listed, Field(max_length=MAX_HOLDINGS)]


def _distinct(ids: Sequence[int]) -> None:
    if len(set(ids)) != len(ids):
        raise ValueError("holding ids are not distinct")


class Advert(Frozen):
    """What a node says of itself. (``boot``, ``sequence``) orders all that one node ever says.

    ``boot`` grows with every start of the node, ``sequence`` with every advert and load report of
    that boot. ``beat``: the author promises its next message within so many seconds.
    """

    version: Literal[1] = 1
    boot: Boot
    sequence: Sequence32
    beat: Beat
    state: Literal["up", "draining", "left"] = "up"
    software: str = Field("", max_length=32)
    addresses: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256)], ...], Listed
    ] = Field((), max_length=8)
    devices: Annotated[tuple[Device, ...], Listed] = Field((), max_length=8)
    holdings: Annotated[tuple[Holding, ...], Listed] = Field((), max_length=MAX_HOLDINGS)
    load: Loads = ()
    stored: Annotated[tuple[StoredModel, ...], Listed] = Field((), max_length=MAX_HOLDINGS)
    wants: Annotated[tuple[Wanted, ...], Listed] = Field((), max_length=MAX_WANTS)
    speeds: Annotated[tuple[MeasuredSpeed, ...], Listed] = Field((), max_length=MAX_SPEEDS)
    links: Annotated[tuple[SeenLink, ...], Listed] = Field((), max_length=MAX_LINKS)
    omitted: int = Field(0, ge=0, le=1 << 16)  # of the lists above, what did not fit

    @model_validator(mode="after")
    def _ids(self) -> Advert:
        _distinct([h.id for h in self.holdings])
        _distinct([entry.id for entry in self.load])
        return self


class LoadReport(Frozen):
    """The quick update between adverts. A holding that it does not name is idle."""

    version: Literal[1] = 1
    boot: Boot
    sequence: Sequence32
    beat: Beat
    load: Loads = ()

    @model_validator(mode="after")
    def _ids(self) -> LoadReport:
        _distinct([entry.id for entry in self.load])
        return self


@dataclass(frozen=True, slots=True)
class SignedAdvert:
    """An advert whose author is proven and admitted, with the bytes that prove it to others."""

    advert: Advert
    certificate: Certificate
    envelope: bytes

    @property
    def peer(self) -> PeerId:
        return self.certificate.peer_id

    @property
    def version(self) -> tuple[int, int]:
        return self.advert.boot, self.advert.sequence


_Signed = TypeVar("_Signed", Advert, LoadReport)


def sign_advert(identity: Identity, advert: Advert) -> SignedAdvert:
    """Sign, leaving out what does not fit in :data:`MAX_ADVERT`.

    First links go, then stored models, speeds, holdings that are not ready, wanted models (some are
    others' words, which must not leave this node without any), then the last of the other holdings,
    so that what others route by goes last; ``omitted`` counts them. Raises
    :class:`AdvertTooLarge` when the certificate chain and the fixed part alone are too long.
    """
    chain = [bytes(der) for der in identity.certificate.chain_der]
    while True:
        body = encode(advert.model_dump(context=WIRE))
        envelope = encode([chain, body, identity.sign(ADVERT_TAG, body)])
        if len(envelope) <= MAX_ADVERT:
            return SignedAdvert(advert, identity.certificate, envelope)
        advert = _smaller(advert, len(envelope) - MAX_ADVERT)


def _smaller(advert: Advert, excess: int) -> Advert:
    """``advert`` with about ``excess`` encoded bytes of its least needed entries left out."""
    stored, holdings, load = list(advert.stored), list(advert.holdings), list(advert.load)
    links, speeds, wants = list(advert.links), list(advert.speeds), list(advert.wants)
    saved = dropped = 0
    while saved < excess and (links or stored or speeds or wants or holdings):
        entry: SeenLink | StoredModel | MeasuredSpeed | Wanted | Holding
        loading = [h for h in holdings if not h.ready]
        if links:
            entry = links.pop()
        elif stored:
            entry = stored.pop()
        elif speeds:
            entry = speeds.pop()
        elif wants and not loading:
            entry = wants.pop()
        else:
            entry = loading[-1] if loading else holdings[-1]
            holdings.remove(entry)
            load = [item for item in load if item.id != entry.id]
        saved += len(encode(entry.model_dump(context=WIRE)))
        dropped += 1
    if not dropped:
        raise AdvertTooLarge(
            f"{excess} bytes too many without any holding: the certificate chain is too long"
        )
    return advert.model_copy(
        update={
            "links": tuple(links),
            "stored": tuple(stored),
            "speeds": tuple(speeds),
            "wants": tuple(wants),
            "holdings": tuple(holdings),
            "load": tuple(load),
            "omitted": min(advert.omitted + dropped, 1 << 16),
        }
    )


def open_advert(
    envelope: bytes, verify_chain: Callable[[tuple[bytes, ...]], Certificate]
) -> SignedAdvert:
    """Check an envelope from anywhere.

    ``verify_chain`` returns the leaf of an admitted chain or raises CertificateError.


    Raises :class:`AdvertError`; nothing larger than a small multiple of :data:`MAX_ADVERT` is
    allocated on the way.
    """
    try:
        parts = decode(envelope, MAX_ADVERT)
    except WireError as error:
        raise AdvertError(f"advert envelope: {error}") from error
    match parts:
        case [list(chain), bytes(body), bytes(signature)] if 1 <= len(chain) <= MAX_CHAIN and all(
            isinstance(der, bytes) for der in chain
        ):
            pass
        case _:
            raise AdvertError("advert envelope: not [chain, body, signature]")
    try:
        certificate = verify_chain(tuple(chain))
    except CertificateError as error:
        raise AdvertError(f"advert's author is not admitted: {error}") from error
    advert = _open_body(Advert, certificate, ADVERT_TAG, body, signature, MAX_ADVERT)
    return SignedAdvert(advert, certificate, envelope)


def sign_load(identity: Identity, report: LoadReport) -> bytes:
    body = encode(report.model_dump(context=WIRE))
    return encode([body, identity.sign(LOAD_TAG, body)])


def open_load(envelope: bytes, certificate: Certificate) -> LoadReport:
    """Check a load report against the certificate of its author. Raises :class:`AdvertError`."""
    try:
        parts = decode(envelope, MAX_LOAD)
    except WireError as error:
        raise AdvertError(f"load report: {error}") from error
    match parts:
        case [bytes(body), bytes(signature)]:
            return _open_body(LoadReport, certificate, LOAD_TAG, body, signature, MAX_LOAD)
        case _:
            raise AdvertError("load report: not [body, signature]")


def _open_body(
    kind: type[_Signed],
    certificate: Certificate,
    tag: bytes,
    body: bytes,
    signature: bytes,
    limit: int,
) -> _Signed:
    try:
        verify_signature(certificate.public_key, tag, body, signature)
        fields: Any = decode(body, limit)
        return kind.model_validate(fields)
    except (SignatureError, WireError, ValidationError) as error:
        raise AdvertError(f"{kind.__name__} of {certificate.peer_id}: {error}") from error
