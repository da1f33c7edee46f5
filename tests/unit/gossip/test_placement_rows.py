"""What adverts carry for placement: it fits, it survives the way, and links are left out first."""

from __future__ import annotations

import time

import pytest
import trio
from pydantic import ValidationError

from mesh.gossip.advert import (
    MAX_ADVERT,
    MAX_LINKS,
    Advert,
    Device,
    Holding,
    MeasuredSpeed,
    SeenLink,
    StoredModel,
    Wanted,
    open_advert,
    sign_advert,
)
from mesh.gossip.knowledge import Knowledge
from mesh.gossip.membership import Table


def wanted(**changes):
    fields = {
        "name": "OpenVINO/Qwen3-8B-int4-ov",
        "digest": "ab" * 32,
        "version": 1_700_000_000_000,
        "publisher": "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp",
        "layers": 36,
        "layer_bytes": 110_000_000,
        "embedding_bytes": 320_000_000,
        "head_bytes": 320_000_000,
        "shared_bytes": 0,
        "kv_bytes": 4096,
        "hidden": 4096,
        "context_length": 40960,
    }
    return Wanted(**{**fields, **changes})


def full():
    return Advert(
        boot=1_700_000_000_000,
        sequence=7,
        beat=10.0,
        software="0.1.0",
        addresses=("/ip4/10.0.0.1/udp/4001/quic-v1",) * 3,
        devices=(
            Device(name="CPU", full_name="x" * 40, total_memory=16 << 30, offered=8 << 30,
                   decode_rate=10**10, prefill_rate=10**12),
        ),
        holdings=tuple(
            Holding(id=i, model="OpenVINO/Qwen3-8B-int4-ov", digest="ab" * 32, kind="stage",
                    first=i, last=i + 9, layers=36, context_length=40960, device="CPU",
                    ready=True, slots=16, queue=64, prefill_seconds=0.01, decode_seconds=0.01,
                    claim=12)
            for i in range(4)
        ),
        stored=tuple(StoredModel(name=f"model-{i}", digest="cd" * 32) for i in range(4)),
        wants=tuple(wanted(name=f"model-{i}") for i in range(4)),
        speeds=tuple(
            MeasuredSpeed(digest="ef" * 32, device="CPU", prefill=0.001, decode=0.01)
            for _ in range(4)
        ),
        links=tuple(
            SeenLink(key=bytes([i] * 8), rtt=1234, jitter=20, loss=3, upload=12500, download=9000,
                     state=i % 3)
            for i in range(MAX_LINKS)
        ),
    )  # fmt: skip


def test_a_full_advert_fits_and_survives_the_way(authority, trust):
    signed = sign_advert(authority.identity("desk-7"), full())
    print(f"{len(signed.envelope)} bytes")
    assert len(signed.envelope) <= MAX_ADVERT
    assert signed.advert.omitted == 0
    opened = open_advert(signed.envelope, lambda chain: trust.verify(chain, time.time()))
    assert opened.advert == full()


def test_links_are_left_out_before_what_is_held(authority):
    much = full().model_copy(
        update={
            "stored": tuple(StoredModel(name="m" * 100, digest="cd" * 32) for _ in range(40)),
        }
    )
    signed = sign_advert(authority.identity("desk-7"), much)
    assert len(signed.envelope) <= MAX_ADVERT
    assert not signed.advert.links and len(signed.advert.stored) < 40
    assert signed.advert.holdings == much.holdings and signed.advert.wants == much.wants


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers": 0},
        {"layer_bytes": 0},
        {"shared_bytes": 1 << 40},
        {"replicas": -1},
        {"sessions": 1 << 20},
        {"version": 0},
        {"context": 2.5},
    ],
)
def test_a_want_with_impossible_numbers_is_refused(wrong):
    with pytest.raises(ValidationError):
        wanted(**wrong)


def test_wants_of_the_far_future_are_passed_on_but_not_believed(authority, trust):
    async def main():
        knowledge = Knowledge(
            Table("ME", 1), trust, on_effect=lambda _: None, on_change=lambda: None
        )
        author = authority.identity("desk-7")
        soon, never = int((time.time() + 60) * 1000), 2**63 - 1
        wants = (wanted(name="a", version=never), wanted(name="b", version=soon))
        signed = sign_advert(author, Advert(boot=1, sequence=1, beat=10.0, wants=wants))
        assert knowledge.take_advert(signed.envelope)
        known = knowledge.table.entries[author.peer_id].signed
        assert [w.name for w in known.advert.wants] == ["b"]
        assert known.envelope == signed.envelope

    trio.run(main)
