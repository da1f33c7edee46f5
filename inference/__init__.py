"""Running models on this machine. Knows nothing of the network."""
