"""Stages of fixed shapes in a chain, and loaded as a node loads them for an NPU."""

from __future__ import annotations

import pytest
import trio

from inference.errors import GenerationError
from inference.static_stage import StaticConfig, StaticStage
from mesh import loading
from mesh.config import NodeConfig

CONFIG = StaticConfig("CPU", context=256, chunk=32, kv_bytes=1 << 28)


@pytest.mark.slow
def test_a_chain_of_them_gives_the_tokens_of_the_uncut_model(
    open_mesh, requests, read_all, uncut
) -> None:
    wanted = requests(4, 16, seeded=False)
    expected = uncut(wanted)

    async def main() -> None:
        async with open_mesh() as mesh:
            mesh._stage = lambda first, last: StaticStage(mesh.cut.cut(first, last), CONFIG)
            chain = await mesh.chain((13,))
            got = {}

            async def client(number: int) -> None:
                got[number] = await read_all(chain, wanted[number])

            async with trio.open_nursery() as nursery:
                for number in range(len(wanted)):
                    nursery.start_soon(client, number)
            assert [got[number] for number in range(len(wanted))] == expected
            await mesh.empty()

    trio.run(main)


def test_a_node_loads_them_for_an_npu(demo_model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "runs_fixed_shapes", lambda device: True)
    config = NodeConfig()

    async def main() -> None:
        stage, speed = await loading.open_stage(demo_model, (0, 2), config, 64 << 20)
        assert isinstance(stage, StaticStage)
        assert stage.context_length == StaticConfig().context
        assert stage.blocks * stage.block_bytes <= 64 << 20
        assert min(speed.values()) > 0
        with pytest.raises(GenerationError, match=f"--stage {demo_model.name}:0-30"):
            await loading.open_engine(demo_model, config)

    trio.run(main)
