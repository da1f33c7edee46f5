"""A mesh of any size in virtual time, over the pure parts of a node as they are.

Real: adverts with their signatures and certificates, membership, anti-entropy, when to publish,
whom to dial and when again, doubts, claims and placement, choice of a route. Simulated: the network
(delay, loss, partitions), processes that come and go, and loading. Many nodes in one process get
the same bytes; what is a function of those bytes alone is computed once for all of them, and a plan
once for all that have the same view.

Gossip is modelled as GossipSub delivers it: a node gets a message once and passes it on to the rest
of its mesh of eight; a message that is lost on all its ways to a node comes with anti-entropy or
not at all. Messages arrive on full tenths of a second.
"""
