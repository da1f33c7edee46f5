"""Adverts, membership and view, anti-entropy, revocation list spread."""
