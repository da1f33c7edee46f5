"""Which offer of a link is taken."""

from __future__ import annotations

from typing import Any

from mesh.identity import PeerId
from mesh.transport.pairing import Existing, Hello, Verdict, decide

SMALL, LARGE = PeerId("12D3KooWA"), PeerId("12D3KooWB")
NEW, OLD, OTHER = b"n" * 16, b"o" * 16, b"x" * 16
BOOT, REBOOT = b"b" * 8, b"r" * 8


def offer(**changes: Any) -> Hello:
    return Hello(**{"link": NEW, "lane": 0, "boot": BOOT, **changes})


def existing(**changes: Any) -> Existing:
    return Existing(**{"link_id": OLD, "peer_boot": BOOT, "offered_here": True, **changes})


def test_first_offer_is_taken() -> None:
    assert decide(offer(), me=SMALL, peer=LARGE, existing=None, offering=False) is Verdict.ACCEPT


def test_crossing_offers_are_settled_the_same_on_both_sides() -> None:
    at_small = decide(offer(), me=SMALL, peer=LARGE, existing=None, offering=True)
    at_large = decide(offer(), me=LARGE, peer=SMALL, existing=None, offering=True)
    assert (at_small, at_large) == (Verdict.WAIT, Verdict.ACCEPT)


def test_offer_that_crossed_ours_is_a_duplicate() -> None:
    verdict = decide(offer(last=OTHER), me=SMALL, peer=LARGE, existing=existing(), offering=False)
    assert verdict is Verdict.DUPLICATE


def test_peer_that_lost_our_link_gets_a_new_one() -> None:
    verdict = decide(offer(last=OLD), me=SMALL, peer=LARGE, existing=existing(), offering=False)
    assert verdict is Verdict.ACCEPT


def test_restarted_peer_gets_a_new_link() -> None:
    verdict = decide(offer(boot=REBOOT), me=SMALL, peer=LARGE, existing=existing(), offering=False)
    assert verdict is Verdict.ACCEPT


def test_peer_that_dials_again_has_lost_its_link() -> None:
    verdict = decide(
        offer(), me=SMALL, peer=LARGE, existing=existing(offered_here=False), offering=False
    )
    assert verdict is Verdict.ACCEPT


def test_only_the_existing_link_can_move() -> None:
    moving = offer(link=OLD, moves=True)
    for present, verdict in (
        (existing(), Verdict.MOVE),
        (existing(link_id=OTHER), Verdict.UNKNOWN),
        (None, Verdict.UNKNOWN),
    ):
        assert decide(moving, me=SMALL, peer=LARGE, existing=present, offering=False) is verdict
