"""What can go wrong with models on disk and on their way there."""

from __future__ import annotations


class StoreError(Exception):
    """A model that cannot be found, fetched, imported or trusted; the message says why."""


class ModelMissing(StoreError):
    """The store has no model of this name."""
