"""`meshnode start`: the node in the foreground, until SIGINT or SIGTERM."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time

import trio

from inference.store.errors import StoreError
from inference.store.manifest import ModelManifest
from inference.store.store import ModelStore
from mesh.cli.exits import CommandError, Exit
from mesh.config import NodeConfig
from mesh.node import Node, Ready, StartError, StartProblem, load_credentials

_EXITS: dict[StartProblem, Exit] = {
    "running": Exit.NOT_RUNNING,
    "certificate": Exit.CERTIFICATE,
    "address": Exit.ADDRESS,
    "model": Exit.MODEL,
}


def start(config: NodeConfig, _: argparse.Namespace) -> int:
    _set_up_logging(config.log)
    try:
        identity, trust = load_credentials(config, time.time())
        models = _fetch_models(config)
        node = Node(
            config,
            identity,
            trust,
            [models[name] for name in config.model],
            [(models[stage.model], stage) for stage in config.stage],
        )
        trio.run(_run, node, restrict_keyboard_interrupt_to_checkpoints=True)
    except StartError as error:
        raise CommandError(_EXITS[error.problem], str(error)) from error
    return Exit.OK


def _fetch_models(config: NodeConfig) -> dict[str, ModelManifest]:
    """The models to serve, whole or in part, fetched where they are missing."""
    names = dict.fromkeys((*config.model, *(stage.model for stage in config.stage)))
    if not names:
        return {}
    store = ModelStore(config.models)
    try:
        models = {name: _fetch(store, name) for name in names}
    except (StoreError, OSError) as error:
        raise StartError("model", str(error)) from error
    for stage in config.stage:
        if stage.last > models[stage.model].layers:
            raise StartError(
                "model",
                f"{stage.model} has {models[stage.model].layers} layers, "
                f"so there is no stage {stage.first}-{stage.last}",
            )
    return models


def _fetch(store: ModelStore, name: str) -> ModelManifest:
    if store.has(name):
        return store.get(name)
    from mesh.cli.model import pull_with_progress  # what is here needs neither hub nor progress

    return pull_with_progress(store, name)


async def _run(node: Node) -> None:
    failure: StartError | None = None
    async with trio.open_nursery() as nursery:
        await nursery.start(_stop_on_signal, node)
        try:
            await node.run(_print_ready)
        except StartError as error:
            failure = error  # raised below, outside of any exception group
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _stop_on_signal(
    node: Node, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        asked = False
        async for _ in signals:
            if asked:  # the second one means now
                raise KeyboardInterrupt
            asked = True
            node.stop()


def _print_ready(ready: Ready) -> None:
    print(f"ready api={ready.api} peer={ready.peer} listen={','.join(ready.listen)}", flush=True)


def _set_up_logging(level: str) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    # py-libp2p logs every stream that a peer resets; what matters of that our transport says.
    if level != "debug":
        for library in ("libp2p", "async_service", "quic"):
            logging.getLogger(library).setLevel(logging.CRITICAL)
