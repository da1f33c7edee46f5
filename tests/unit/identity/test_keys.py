"""A node's key on disk, and signatures under tags."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from mesh.identity import (
    KeyFileError,
    SignatureError,
    create_key,
    init_node,
    load_key,
    peer_id_of,
    sign,
    verify_signature,
)

TAG = b"meshnode-receipt-v1"


def test_a_key_is_private_and_comes_back(tmp_path):
    path = tmp_path / "node.key"
    key = create_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_key(path).private_bytes_raw() == key.private_bytes_raw()


def test_a_key_is_never_overwritten(tmp_path):
    path = tmp_path / "node.key"
    key = create_key(path)
    with pytest.raises(KeyFileError, match="never overwritten"):
        create_key(path)
    assert load_key(path).private_bytes_raw() == key.private_bytes_raw()


def pem(key, encryption=None) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption())


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "not a private key"),
        (b"\xff" * 100, "not a private key"),
        (b"x" * 5000, "larger"),
        (pem(ec.generate_private_key(ec.SECP256R1())), "not an Ed25519 key"),
        (
            pem(Ed25519PrivateKey.generate(), BestAvailableEncryption(b"secret")),
            "without a passphrase",
        ),
    ],
)
def test_what_is_no_key(tmp_path, content, match):
    path = tmp_path / "node.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(KeyFileError, match=match) as caught:
        load_key(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_no_file_and_no_folder(tmp_path):
    with pytest.raises(KeyFileError, match="meshnode init"):
        load_key(tmp_path / "node.key")
    with pytest.raises(KeyFileError, match="cannot read"):
        load_key(tmp_path)
    with pytest.raises(KeyFileError, match="cannot write"):
        create_key(tmp_path / "nowhere" / "node.key")


def test_a_key_that_others_can_read_is_remarked_on(tmp_path, caplog):
    path = tmp_path / "node.key"
    create_key(path)
    load_key(path)
    assert not caplog.records
    path.chmod(0o644)
    load_key(path)
    assert "chmod 600" in caplog.text


def test_signatures_belong_to_key_tag_and_data():
    key = Ed25519PrivateKey.generate()
    signature = sign(key, TAG, b"data")
    assert len(signature) == 64
    verify_signature(key.public_key(), TAG, b"data", signature)
    other = Ed25519PrivateKey.generate().public_key()
    for public_key, tag, data, given in (
        (other, TAG, b"data", signature),
        (key.public_key(), b"meshnode-receipt-v2", b"data", signature),
        (key.public_key(), TAG, b"date", signature),
        (key.public_key(), TAG, b"data", signature[:-1] + bytes([signature[-1] ^ 1])),
        (key.public_key(), TAG, b"data", b""),
        (key.public_key(), TAG, b"data", bytes(100_000)),
    ):
        with pytest.raises(SignatureError):
            verify_signature(public_key, tag, data, given)


def test_tag_and_data_cannot_be_shifted():
    key = Ed25519PrivateKey.generate()
    signature = sign(key, b"mesh-a", b"b\0data")
    with pytest.raises(SignatureError):
        verify_signature(key.public_key(), b"mesh-ab", b"data", signature)
    for tag in (
        b"",
        b"mesh",
        b"libp2p-tls-handshake",
        b"mesh-a\0b",
        b"MESH-a",
        b"mesh" + b"a" * 61,
    ):
        with pytest.raises(ValueError, match="tag"):
            sign(key, tag, b"data")


def test_init_makes_a_key_and_a_request_and_keeps_the_key(tmp_path):
    home = tmp_path / "deep" / "home"
    first = init_node(home, "desk-7")
    assert first.key_is_new and first.request_path == home / "desk-7.csr"
    assert first.key_path.stat().st_mode & 0o777 == 0o600
    assert first.peer_id == peer_id_of(load_key(first.key_path).public_key())
    again = init_node(home, "desk-8")
    assert not again.key_is_new and again.peer_id == first.peer_id
    assert again.request_path.exists()


def test_init_says_what_is_wrong(tmp_path):
    with pytest.raises(ValueError, match="cannot be a node's name"):
        init_node(tmp_path, "../x")
    (tmp_path / "node.key").write_text("mine")
    with pytest.raises(KeyFileError, match="not a private key"):
        init_node(tmp_path, "desk-7")
    assert (tmp_path / "node.key").read_text() == "mine"
    (tmp_path / "file").write_text("")
    with pytest.raises(KeyFileError, match="cannot make"):
        init_node(tmp_path / "file" / "home", "desk-7")
