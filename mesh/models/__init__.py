"""Weights from peers: exactly the layers that a node needs, in verified chunks."""
