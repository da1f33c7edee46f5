"""A machine whose device runs fixed shapes only: what the plan gives it is what it can load."""

from __future__ import annotations

import random
import time

import pytest
import trio

from mesh import loading
from mesh.capacity import Capacity
from mesh.config import NodeConfig
from mesh.gossip.service import GossipService
from mesh.holdings import Holdings
from mesh.identity import TrustStore
from mesh.placing import Placing
from mesh.stages import StageServer
from mesh.transport import Transport, TransportConfig

CONTEXT = 128


@pytest.mark.slow
def test_a_whole_model_is_loaded_as_one_stage_with_the_context_that_is_wanted(
    make_authority, demo_model, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "runs_fixed_shapes", lambda device: True)
    monkeypatch.setattr(Capacity, "static", True)
    config = NodeConfig(home=tmp_path, models=demo_model.path.parent, memory="2GB")
    authority = make_authority("testnet", time.time() - 86_400)
    identity = authority.identity("npu")
    trust = TrustStore(authority.network, [authority.root], tmp_path / "revoked")

    async def fetch(wanted, layers):
        return demo_model

    async def main() -> None:
        async with (
            Transport.open(
                TransportConfig(listen=("/ip4/127.0.0.1/udp/0/quic-v1",)), identity, trust
            ) as transport,
            trio.open_nursery() as nursery,
        ):
            gossip = GossipService(transport, identity, trust, boot=1, rng=random.Random(1))
            holdings = Holdings(
                on_change=lambda: gossip.announce(holdings=holdings.announced),
                on_load=lambda: gossip.report(holdings.loads),
            )
            server = StageServer(
                transport,
                identity,
                config,
                holdings,
                view=lambda: gossip.view,
                addresses=lambda peer: (),
                on_load=lambda: None,
            )

            async def stages():
                return server

            placing = Placing(gossip, holdings, identity, config, stages=stages, fetch=fetch)
            await nursery.start(gossip.run)
            await nursery.start(server.run)
            await nursery.start(placing.run)
            await placing.serve(
                demo_model.name, replicas=1, max_nodes=None, context=CONTEXT, sessions=2
            )
            with trio.fail_after(120):
                view = await gossip.wait_until(lambda view: view.can_use(demo_model.name))
            (holding,) = view.nodes[identity.peer_id].holdings
            assert holding.kind == "stage" and (holding.first, holding.last) == (0, 30)
            assert holding.context_length == CONTEXT
            assert server.chains.load(demo_model.digest, 0, 30) == (0, 0)
            nursery.cancel_scope.cancel()

    trio.run(main)
