"""A node's identity and the trust it places in others. Knows nothing of transports."""

from __future__ import annotations

from ca.certificate import (
    Certificate,
    CertificateError,
    PeerId,
    Reason,
    Role,
    Root,
    peer_id_of,
)
from ca.crl import RevocationList
from ca.naming import public_key_of
from mesh.identity.enrol import Enrolment, init_node
from mesh.identity.keys import (
    KeyFileError,
    SignatureError,
    create_key,
    load_key,
    sign,
    verify_signature,
)
from mesh.identity.node import (
    CertificateFileError,
    Identity,
    NodePem,
    identity_of,
    load_identity,
    load_node_pem,
    load_roots,
)
from mesh.identity.trust import AdmissionError, TrustStore

__all__ = [
    "AdmissionError",
    "Certificate",
    "CertificateError",
    "CertificateFileError",
    "Enrolment",
    "Identity",
    "KeyFileError",
    "NodePem",
    "PeerId",
    "Reason",
    "RevocationList",
    "Role",
    "Root",
    "SignatureError",
    "TrustStore",
    "create_key",
    "identity_of",
    "init_node",
    "load_identity",
    "load_key",
    "load_node_pem",
    "load_roots",
    "peer_id_of",
    "public_key_of",
    "sign",
    "verify_signature",
]
