"""The node: everything that crosses the network."""
