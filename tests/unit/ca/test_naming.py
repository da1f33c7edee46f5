"""Names, roles, PeerIds and URIs have one form each."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ca.naming import (
    Role,
    format_roles,
    is_network,
    is_node_name,
    is_strong_key,
    network_uri,
    node_uri,
    parse_roles,
    parse_uri,
    peer_id_of,
    public_key_of,
)


@pytest.mark.parametrize("name", ["a", "desk-7", "Desk_7.lab", "7", "a" * 63, "0" * 39])
def test_node_names(name):
    assert is_node_name(name)


@pytest.mark.parametrize(
    "name",
    ["", "-a", "a-", "a b", "a/b", "..", "a\n", "a" * 64, "é", "0123456789abcdef" * 2 + "0" * 8],
)
def test_no_node_names(name):
    assert not is_node_name(name)


def test_a_peer_id_is_no_node_name():
    assert not is_node_name(peer_id_of(Ed25519PrivateKey.generate().public_key()))


def test_networks_are_dns_labels():
    assert is_network("acme-2")
    assert not any(map(is_network, ["", "Acme", "a.b", "a_b", "-a", "a-", "a" * 64, "a\n"]))


def test_roles_in_any_order_once_each():
    assert parse_roles("use, serve") == {Role.SERVE, Role.USE}
    assert format_roles(parse_roles("use,serve,admin")) == "admin,serve,use"
    for text in ("", "serve,", "root", "SERVE", "serve,serve"):
        with pytest.raises(ValueError, match="role"):
            parse_roles(text)


def test_a_peer_id_holds_the_key():
    key = Ed25519PrivateKey.generate().public_key()
    assert public_key_of(peer_id_of(key)) == key


@pytest.mark.parametrize(
    "text",
    [
        "",
        "12D3KooW",
        "Qm" + "a" * 44,
        "0" * 52,  # not in the alphabet
        "1" * 52,
        "z" * 52,
        "é" * 52,
        "1" * 1_000_000,
    ],
)
def test_what_is_no_peer_id(text):
    with pytest.raises(ValueError, match="not the PeerId"):
        public_key_of(text)


def test_uris_round_trip():
    peer_id = peer_id_of(Ed25519PrivateKey.generate().public_key())
    assert parse_uri(node_uri("acme", peer_id)) == ("acme", peer_id)
    assert parse_uri(network_uri("acme")) == ("acme", None)


# Every encoding, canonical or not, of the points whose order divides 8 (RFC 7748, 6.1 has the
# like for X25519; these follow from the curve equation of RFC 8032, 5.1).
P = 2**255 - 19
D = -121665 * pow(121666, -1, P) % P


def small_order_encodings() -> set[bytes]:
    # y of order 8: x^2 = y^2 / (...) leads to d*y^4 + 2*y^2 - 1 = 0, so y^2 = (-1 ± sqrt(1+d)) / d.
    root = square_root((1 + D) % P)
    ys = {0, 1, P - 1}
    for sign in (root, P - root):
        y = square_root((sign - 1) * pow(D, -1, P) % P)
        if y is not None:
            ys |= {y, P - y}
    encodings = set()
    for y in ys | {y + P for y in ys if y + P < 2**255}:
        for sign in (0, 1):
            encodings.add((y | sign << 255).to_bytes(32, "little"))
    return encodings


def square_root(a: int) -> int | None:
    """Modulo P, which is 5 modulo 8."""
    candidate = pow(a, (P + 3) // 8, P)
    for root in (candidate, candidate * pow(2, (P - 1) // 4, P) % P):
        if root * root % P == a:
            return root
    return None


def test_all_small_order_keys_are_weak():
    encodings = small_order_encodings()
    assert len(encodings) == 14
    for encoding in encodings:
        assert not is_strong_key(Ed25519PublicKey.from_public_bytes(encoding)), encoding.hex()


def test_real_keys_are_strong():
    assert all(is_strong_key(Ed25519PrivateKey.generate().public_key()) for _ in range(50))
