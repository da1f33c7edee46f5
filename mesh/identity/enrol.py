"""Making a node's key and its certificate request: what ``meshnode init`` does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ca.certificate import PeerId, peer_id_of
from ca.files import KEY_FILE, make_private_folder, write_atomic
from ca.naming import NODE_NAME_RULE, is_node_name
from ca.request import make_request
from mesh.identity.keys import KeyFileError, create_key, load_key


@dataclass(frozen=True)
class Enrolment:
    """What :func:`init_node` left under ``home``."""

    peer_id: PeerId
    key_path: Path
    request_path: Path
    key_is_new: bool


def init_node(home: Path, name: str) -> Enrolment:
    """Make ``home/node.key`` (mode 0600) and ``home/<name>.csr`` for the CA to sign.

    A key that is there already is kept, and only the request is written again. Raises ValueError
    for a bad name, KeyFileError when something cannot be written or the key there is not usable.
    """
    if not is_node_name(name):
        raise ValueError(f"{name!r} cannot be a node's name: it is {NODE_NAME_RULE}")
    key_path = home / KEY_FILE
    request_path = home / f"{name}.csr"
    try:
        make_private_folder(home)
    except OSError as error:
        raise KeyFileError(f"cannot make the folder {home}: {error.strerror}") from error
    key_is_new = not key_path.exists()
    key = create_key(key_path) if key_is_new else load_key(key_path)
    try:
        write_atomic(request_path, make_request(key, name))
    except OSError as error:
        raise KeyFileError(f"cannot write {request_path}: {error.strerror}") from error
    return Enrolment(peer_id_of(key.public_key()), key_path, request_path, key_is_new)
