"""QUIC for the mesh: wire-compatible with libp2p ``quic-v1``, driven by events instead of polling.

``core`` subclasses aioquic's protocol engine, ``udp`` moves datagrams, ``endpoint`` joins the two
on one socket, ``connection`` and ``stream`` present the result to py-libp2p, ``listen`` is the
libp2p transport itself.
"""
