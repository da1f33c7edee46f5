"""The certificate authority of a network: usable without the mesh."""
