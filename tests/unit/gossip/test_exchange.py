"""What peers send each other over links: bounded, strict, and no proof that can be forged."""

from __future__ import annotations

import secrets

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.gossip import anti_entropy, exchange, revocation
from mesh.gossip.anti_entropy import Record
from mesh.gossip.exchange import AliveAnswer, SyncCall, decode_transfer, encode_transfer, parse
from mesh.gossip.wire import WireError


def test_a_transfer_survives():
    records = (Record(1.5, b"advert"), Record(0.0, b""))
    transfer = decode_transfer(encode_transfer(records, [b"list"]))
    assert transfer.records == records
    assert transfer.lists == (b"list",)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        [[], [], []],
        [[[1.0]], []],
        [[[-1.0, b""]], []],
        [[[float("nan"), b""]], []],
        [[[float("inf"), b""]], []],
        [[[1, b""]], []],
        [[[1.0, b"x" * 5000]], []],
        [[], ["text"]],
        [[], [b"x" * (300 << 10)]],
        [[], [b""] * 9],
        [[[0.0, b""]] * 5000, []],
    ],
)
def test_hostile_transfers_are_refused(value):
    with pytest.raises(WireError):
        decode_transfer(cbor2.dumps(value))


@given(data=st.binary(max_size=500))
def test_noise_is_refused(data):
    with pytest.raises(WireError):
        decode_transfer(data)


@given(data=st.binary(max_size=300))
def test_digests_of_any_bytes_are_read_or_refused(data):
    if len(data) % 20 == 0:
        assert len(anti_entropy.parse_digest(data)) <= len(data) // 20
    else:
        with pytest.raises(WireError):
            anti_entropy.parse_digest(data)


def test_what_is_too_long_is_refused():
    with pytest.raises(WireError):
        anti_entropy.parse_digest(bytes(anti_entropy.MAX_DIGEST + 20))
    with pytest.raises(WireError):
        anti_entropy.parse_wanted(bytes(anti_entropy.MAX_WANTED + 8))


@pytest.mark.parametrize(
    "value",
    [None, [1], [[b"short", 1]], [[bytes(32), -1]], [[bytes(32), 1 << 64]], [[bytes(32), 1]] * 9],
)
def test_hostile_list_numbers_are_refused(value):
    with pytest.raises(WireError):
        revocation.parse_numbers(value)


@pytest.mark.parametrize("body", [None, {}, {"boot": 1}, {"boot": 0, "lists": []}, [1, []]])
def test_hostile_bodies_are_refused(body):
    with pytest.raises(WireError):
        parse(SyncCall, body)


def test_a_proof_of_life_is_for_one_nonce_boot_and_key(authority):
    author, other = authority.identity("a"), authority.identity("b")
    nonce = secrets.token_bytes(16)
    answer = exchange.prove_alive(author, nonce, 7)
    key = author.certificate.public_key
    assert exchange.is_proof(answer, nonce, key)
    assert not exchange.is_proof(answer, secrets.token_bytes(16), key)
    assert not exchange.is_proof(answer, nonce, other.certificate.public_key)
    forged = AliveAnswer(boot=8, signature=answer.signature)
    assert not exchange.is_proof(forged, nonce, key)
