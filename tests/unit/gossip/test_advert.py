"""Adverts and load reports: signing, checking, staying small, refusing what is wrong."""

from __future__ import annotations

import time
from typing import Any

import cbor2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ca.crl import build_crl
from mesh.gossip.advert import (
    ADVERT_TAG,
    MAX_ADVERT,
    MAX_LOAD,
    MAX_WANTS,
    Advert,
    AdvertError,
    AdvertTooLarge,
    Device,
    Holding,
    HoldingLoad,
    LoadReport,
    StoredModel,
    Wanted,
    open_advert,
    open_load,
    sign_advert,
    sign_load,
)
from mesh.gossip.wire import WIRE, WireError, decode, encode


def holding(id_: int = 0, **changes: Any) -> Holding:
    fields: dict[str, Any] = {
        "id": id_,
        "model": "smollm2-135m-instruct",
        "digest": "ab" * 32,
        "kind": "replica",
        "first": 0,
        "last": 30,
        "layers": 30,
        "context_length": 8192,
        "device": "CPU",
        "ready": True,
        "slots": 16,
        "queue": 64,
        "prefill_seconds": 0.002,
        "decode_seconds": 0.025,
    }
    return Holding(**{**fields, **changes})


def advert(**changes: Any) -> Advert:
    fields: dict[str, Any] = {
        "boot": 1_700_000_000_000,
        "sequence": 7,
        "beat": 10.0,
        "software": "0.1.0",
        "addresses": ("/ip4/10.0.0.1/udp/4001/quic-v1",),
        "devices": (Device(name="CPU", full_name="Some CPU", total_memory=16 << 30),),
        "holdings": (holding(),),
        "load": (HoldingLoad(id=0, active=2, waiting=1, free_kv=4096),),
        "stored": (StoredModel(name="big", digest="cd" * 32),),
    }
    return Advert(**{**fields, **changes})


def check_with(trust):
    return lambda chain: trust.verify(chain, time.time())


def test_an_advert_survives_the_way_to_a_third_node(authority, trust):
    author = authority.identity("desk-7")
    signed = sign_advert(author, advert())
    opened = open_advert(signed.envelope, check_with(trust))
    assert opened.advert == advert()
    assert opened.peer == author.peer_id
    assert opened.certificate.name == "desk-7"
    assert opened.version == (1_700_000_000_000, 7)
    assert len(signed.envelope) < 1200


def test_json_names_the_fields_and_the_wire_does_not():
    assert holding().model_dump(mode="json")["digest"] == "ab" * 32
    row = holding().model_dump(context=WIRE)
    assert isinstance(row, list)
    assert row[2] == bytes.fromhex("ab" * 32)


def test_every_changed_byte_is_noticed(authority, trust):
    envelope = sign_advert(authority.identity("desk-7"), advert()).envelope
    for position in range(0, len(envelope), 3):
        broken = bytearray(envelope)
        broken[position] ^= 0x01
        with pytest.raises(AdvertError):
            open_advert(bytes(broken), check_with(trust))


def test_a_signature_under_another_tag_does_not_count(authority, trust):
    author = authority.identity("desk-7")
    body = encode(advert().model_dump(context=WIRE))
    chain = list(author.certificate.chain_der)
    good = encode([chain, body, author.sign(ADVERT_TAG, body)])
    assert open_advert(good, check_with(trust)).advert == advert()
    bad = encode([chain, body, author.sign(b"meshnode-load-v1", body)])
    with pytest.raises(AdvertError, match="signature"):
        open_advert(bad, check_with(trust))


def test_another_networks_author_is_refused(make_authority, trust):
    stranger = make_authority().identity("stranger")
    with pytest.raises(AdvertError, match="not admitted"):
        open_advert(sign_advert(stranger, advert()).envelope, check_with(trust))


def test_a_revoked_author_is_refused(authority, trust):
    author = authority.identity("desk-7", serial=77)
    envelope = sign_advert(author, advert()).envelope
    open_advert(envelope, check_with(trust))
    now = time.time()
    trust.apply_crl(
        build_crl(authority.key, authority.root_der, number=1, now=now, revoked={77: now})
    )
    with pytest.raises(AdvertError, match="revoked"):
        open_advert(envelope, check_with(trust))


def test_what_does_not_fit_is_left_out_least_needed_first(authority, trust):
    ready = tuple(holding(i, model=f"model-{i}") for i in range(40))
    loading = tuple(holding(100 + i, ready=False) for i in range(8))
    stored = tuple(StoredModel(name=f"stored-{i}", digest="ef" * 32) for i in range(64))
    author = authority.identity("desk-7")

    fits = sign_advert(author, advert(holdings=ready[:8] + loading, stored=stored))
    assert len(fits.envelope) <= MAX_ADVERT
    opened = open_advert(fits.envelope, check_with(trust)).advert
    assert opened.holdings == ready[:8] + loading
    assert 0 < len(opened.stored) < 64
    assert opened.omitted == 64 - len(opened.stored)

    crowded = sign_advert(author, advert(holdings=ready + loading, stored=stored)).advert
    assert crowded.stored == ()
    assert all(h.ready for h in crowded.holdings)
    assert len(crowded.holdings) >= 25
    assert crowded.omitted == 64 + 48 - len(crowded.holdings)
    assert {item.id for item in crowded.load} <= {h.id for h in crowded.holdings}


def test_what_others_want_served_does_not_silence_a_node(authority, trust):
    """A node repeats it, up to a number; how long it is, others decide."""
    wants = [
        Wanted(
            name=f"{n}" + "\U0001d11e" * 127, digest="ab" * 32, version=(1 << 63) - 1,
            publisher="p" * 128, layers=30, layer_bytes=1 << 40, embedding_bytes=1 << 40,
            head_bytes=1 << 40,
            shared_bytes=1 << 40, kv_bytes=1 << 30, hidden=1 << 20, context_length=1 << 30,
        )
        for n in range(MAX_WANTS)
    ]  # fmt: skip
    signed = sign_advert(
        authority.identity("node"),
        advert(wants=wants, addresses=["/ip4/192.0.2.1/udp/4001/quic-v1/p2p/" + "x" * 52] * 4),
    )
    assert len(signed.envelope) <= MAX_ADVERT
    assert signed.advert.holdings
    assert 0 < len(signed.advert.wants) < MAX_WANTS
    assert open_advert(signed.envelope, lambda c: trust.verify(c, time.time())) == signed


def test_a_chain_that_alone_is_too_long_is_an_error(authority):
    long = tuple(f"/dns4/{'x' * 230}{i}/udp/4001/quic-v1" for i in range(8))
    devices = tuple(Device(name=f"GPU.{i}", full_name="y" * 80) for i in range(8))
    author = authority.identity("desk-7")
    certificate = author.certificate
    padded = type(certificate)(
        **{
            **{f: getattr(certificate, f) for f in certificate.__dataclass_fields__},
            "chain_der": (certificate.der,) * 4,
        }
    )
    with pytest.raises(AdvertTooLarge):
        sign_advert(
            type(author)(author.key, padded, author.roots),
            advert(addresses=long, devices=devices, holdings=(), load=(), stored=()),
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"first": 5, "last": 5, "kind": "stage"},
        {"first": 5, "last": 31, "kind": "stage"},
        {"first": 0, "last": 15},  # a replica of half a model
        {"digest": "xy" * 32},
        {"decode_seconds": float("nan")},
        {"decode_seconds": 0.0},
        {"slots": 0},
        {"id": "0"},
        {"model": ""},
        {"model": "x" * 129},
    ],
)
def test_impossible_holdings_are_refused(changes):
    with pytest.raises(ValidationError):
        holding(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"boot": 0},
        {"sequence": 1 << 32},
        {"beat": 1e9},
        {"holdings": (holding(1), holding(1))},
        {"addresses": ("x",) * 9},
        {"surprise": 1},
    ],
)
def test_impossible_adverts_are_refused(changes):
    with pytest.raises(ValidationError):
        advert(**changes)


def test_load_reports(authority):
    author, other = authority.identity("a"), authority.identity("b")
    report = LoadReport(
        boot=5, sequence=9, beat=2.0, load=(HoldingLoad(id=3, active=1, waiting=0, free_kv=None),)
    )
    envelope = sign_load(author, report)
    assert open_load(envelope, author.certificate) == report
    assert len(envelope) < 200
    with pytest.raises(AdvertError):
        open_load(envelope, other.certificate)
    with pytest.raises(AdvertError):
        open_load(envelope + b"\0", author.certificate)
    most = LoadReport(
        boot=(1 << 63) - 1,
        sequence=(1 << 32) - 1,
        beat=2.0,
        load=tuple(
            HoldingLoad(id=65000 + i, active=1 << 16, waiting=1 << 20, free_kv=1 << 39)
            for i in range(64)
        ),
    )
    assert len(sign_load(author, most)) <= MAX_LOAD


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"\x01\x02",  # a second item
        b"\x9f\x01\xff",  # indefinite length
        b"\x5b\x7f\xff\xff\xff\xff\xff\xff\xff",  # a length that is not there
        b"\x9b\x7f\xff\xff\xff\xff\xff\xff\xff",
        b"\x81" * 4000,
        b"\xc1\x01",  # a date
        b"\xd8\x23\x61\x61",  # a regular expression
        b"\xd8\x1c\x81\xd8\x1d\x00",  # a list that holds itself
        b"\xc2\x41\x05",  # a big number
        b"\xd9\xff\xff\x01",  # a tag nobody knows
        b"\x18\x05",  # 5, the long way
        b"\xa2\x01\x01\x01\x02",  # a key twice
        b"\x61\xff",  # not UTF-8
    ],
)
def test_hostile_cbor_is_refused(data):
    with pytest.raises(WireError):
        decode(data, 4096)


def test_more_than_the_limit_is_not_looked_at():
    with pytest.raises(WireError, match="at most 10"):
        decode(cbor2.dumps(b"x" * 100), 10)


_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.binary(max_size=64) | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.one_of(st.binary(max_size=300), _JUNK.map(encode)))
def test_fuzzed_envelopes_only_raise_advert_errors(authority, trust, data):
    with pytest.raises(AdvertError):
        open_advert(data, check_with(trust))
    with pytest.raises(AdvertError):
        open_load(data, authority.identity("a").certificate)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(body=_JUNK, field=st.sampled_from(sorted(Advert.model_fields)))
def test_fuzzed_bodies_of_admitted_authors_only_raise_advert_errors(authority, trust, body, field):
    """An admitted node may still send nonsense: whole bodies, and one field of a good one."""
    author = authority.identity("desk-7")
    for value in (body, {**advert().model_dump(context=WIRE), field: body}):
        raw = encode(value)
        envelope = encode([list(author.certificate.chain_der), raw, author.sign(ADVERT_TAG, raw)])
        try:
            opened = open_advert(envelope, check_with(trust))
        except AdvertError:
            continue
        # Junk that happens to be a possible value of that field.
        assert Advert.model_validate(opened.advert.model_dump()) == opened.advert
