"""Peers in processes of their own that are killed or that hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import trio
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from ca.pem import write_bundle

LONE_NODE = Path(__file__).with_name("lone_node.py")


@contextmanager
def process(folder, identity, root_der, boot, address=""):
    folder.mkdir(exist_ok=True)
    pem = identity.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "node.key").write_bytes(pem)
    (folder / "node.key").chmod(0o600)
    (folder / "node.pem").write_bytes(write_bundle([identity.certificate.der, root_der]))
    command = [sys.executable, str(LONE_NODE), str(folder), str(boot), address]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        try:
            yield child
        finally:
            child.kill()


async def address_of(child):
    line = await trio.to_thread.run_sync(child.stdout.readline)
    assert line, "the process ended"
    return line.decode().strip()


async def until(node, peer, holds, within):
    start = time.monotonic()
    with trio.fail_after(within):
        await node.gossip.wait_until(lambda v: holds(v.nodes.get(peer)))
    return time.monotonic() - start


def suspect_or_gone(entry):
    return entry is None or entry.status == "suspect"


def alive(entry):
    return entry is not None and entry.status == "alive"


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_falls_silent_is_suspect_soon_and_then_gone(on_net, tmp_path, how):
    async def test(net):
        nodes = await net.mesh(3)
        identity = net.identity("lost")
        address = nodes[0].transport.addresses[0]
        with process(tmp_path / "lost", identity, net.root_der, 1, address) as child:
            await address_of(child)
            for node in nodes:
                await until(node, identity.peer_id, alive, 10)
            await trio.sleep(1)
            child.send_signal(how)
            times = [await until(n, identity.peer_id, suspect_or_gone, 12) for n in nodes]
            gone = [await until(n, identity.peer_id, lambda e: e is None, 6) for n in nodes]
            print(
                f"{how.name}: suspect everywhere after {sum(times):.1f} s,"
                f" gone after {sum(times) + sum(gone):.1f} s"
            )
            if how is signal.SIGSTOP:
                child.send_signal(signal.SIGCONT)
                for node in nodes:
                    await until(node, identity.peer_id, alive, 30)

    on_net(test)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_pause_of_a_second_changes_nothing(on_net, tmp_path):
    async def test(net):
        nodes = await net.mesh(2)
        identity = net.identity("slow")
        address = nodes[0].transport.addresses[0]
        seen = []
        with process(tmp_path / "slow", identity, net.root_der, 1, address) as child:
            await address_of(child)
            for node in nodes:
                await until(node, identity.peer_id, alive, 10)
            with trio.fail_after(40):
                async with trio.open_nursery() as nursery:

                    async def watch(node):
                        async for view in node.gossip.views():
                            seen.append(alive(view.nodes.get(identity.peer_id)))

                    for node in nodes:
                        nursery.start_soon(watch, node)
                    rounds = 0
                    while rounds < 3:
                        seen.clear()
                        began = time.monotonic()
                        async with trio.open_nursery() as asking:
                            child.send_signal(signal.SIGSTOP)
                            for node in nodes:
                                asking.start_soon(node.gossip._talks.check, identity.peer_id)
                            await trio.sleep(1.0)
                            child.send_signal(signal.SIGCONT)
                        await trio.sleep(1.5)
                        if time.monotonic() - began < 3.1:
                            assert seen
                            assert all(seen)
                            rounds += 1
                        else:  # the answers may be too late because this process stood still, too
                            for node in nodes:
                                await until(node, identity.peer_id, alive, 10)
                    nursery.cancel_scope.cancel()

    on_net(test)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_killed_peer_that_restarts_within_two_seconds_is_used_again(on_net, tmp_path):
    async def test(net):
        nodes = await net.mesh(3)
        identity = net.identity("phoenix")
        address = nodes[0].transport.addresses[0]
        with process(tmp_path / "p", identity, net.root_der, 1, address) as child:
            await address_of(child)
            for node in nodes:
                await until(node, identity.peer_id, alive, 10)
            await trio.sleep(1)
            child.kill()
        start = time.monotonic()
        with process(tmp_path / "p", identity, net.root_der, 2, address) as child:
            await address_of(child)
            back = time.monotonic()

            def anew(entry):
                return alive(entry) and entry.advert.boot == 2 and entry.link is not None

            for node in nodes:
                await until(node, identity.peer_id, anew, 10)
                assert len(node.gossip.view.nodes) == 4
            used = time.monotonic() - back
            print(f"restarted after {back - start:.1f} s, used again {used:.2f} s later")

    on_net(test)


@pytest.mark.slow
def test_an_idle_node_is_idle(on_net, tmp_path):
    """Three processes and this one; prints what an idle node costs."""

    async def test(net):
        first = await net.start(net.identity("first"))
        address = first.transport.addresses[0]
        identities = [net.identity(f"idle-{i}") for i in range(3)]
        with (
            process(tmp_path / "0", identities[0], net.root_der, 1, address) as a,
            process(tmp_path / "1", identities[1], net.root_der, 1, address) as b,
            process(tmp_path / "2", identities[2], net.root_der, 1, address) as c,
        ):
            children = [a, b, c]
            for child in children:
                await address_of(child)
            for identity in identities:
                await until(first, identity.peer_id, alive, 20)
            await trio.sleep(2)
            watched = [psutil.Process(child.pid) for child in children]
            before = [sum(p.cpu_times()[:2]) for p in watched]
            await trio.sleep(5)
            used = [sum(p.cpu_times()[:2]) - b for p, b in zip(watched, before, strict=True)]
            percent = [100 * u / 5 for u in used]
            memory = [p.memory_info().rss / 1e6 for p in watched]
            print(f"idle: {[f'{p:.2f} %' for p in percent]}, {[f'{m:.0f} MB' for m in memory]}")
            assert max(percent) < 10
            assert max(memory) < 250

    on_net(test)
