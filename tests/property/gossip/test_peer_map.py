"""A peer map is a dictionary of which older versions stay as they were."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mesh.gossip.peer_map import PeerMap

PEERS = st.text("abcdefgh", max_size=2)
CHANGES = st.lists(
    st.tuples(st.dictionaries(PEERS, st.integers(), max_size=4), st.lists(PEERS, max_size=3)),
    max_size=20,
)


@given(changes=CHANGES)
def test_it_is_what_a_dictionary_would_be_and_never_changes(changes):
    versions = [(PeerMap(), {})]
    for entries, without in changes:
        now, model = versions[-1]
        kept = {peer: entry for peer, entry in model.items() if peer not in without}
        versions.append((now.changed(entries, without), {**kept, **entries}))
    for now, model in versions:
        assert now == model
        assert len(now) == len(model)
        assert dict(now.items()) == model
        assert set(now) == set(model)
        assert sorted(now.values()) == sorted(model.values())
        for peer in ("", "a", "ab", "zz"):
            assert now.get(peer) == model.get(peer)
            assert (peer in now) == (peer in model)
            assert now.get(peer, "none") == model.get(peer, "none")
