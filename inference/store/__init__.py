"""Models on disk: manifests, digests, download, import."""
