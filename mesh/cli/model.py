"""`meshnode model`: the models on this machine."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from inference.store.download import KNOWN, pull
from inference.store.errors import ModelMissing, StoreError
from inference.store.manifest import ModelManifest
from inference.store.store import ModelStore
from mesh.cli.exits import CommandError, Exit
from mesh.config import NodeConfig


def model(config: NodeConfig, options: argparse.Namespace) -> int:
    store = ModelStore(config.models)
    try:
        if options.action == "pull":
            manifest = pull_with_progress(store, options.name)
            print(f"{manifest.name} {manifest.digest}")
        elif options.action == "import":
            manifest = _import(store, options.path, options.name)
            print(f"{manifest.name} {manifest.digest}")
        elif options.action == "export":
            manifest = _export(store, options)
            print(f"{manifest.name} {manifest.digest}")
        elif options.action == "rm":
            store.remove(options.name)
        else:
            _print_list(store.list())
    except ModelMissing as error:
        raise CommandError(Exit.MODEL, str(error)) from error
    except StoreError as error:
        raise CommandError(Exit.MODEL, str(error)) from error
    except OSError as error:
        raise CommandError(Exit.FAILED, str(error)) from error
    return Exit.OK


def pull_with_progress(store: ModelStore, name: str) -> ModelManifest:
    """Fetch a model with a progress bar on standard error (lines, where that is no terminal)."""
    console = Console(stderr=True)
    if store.has(name) or not console.is_terminal:
        if not store.has(name):
            console.print(f"fetching {name}", markup=False, highlight=False)
        return pull(store, name)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, TransferSpeedColumn(), console=console) as bar:
        task = bar.add_task(f"fetching {name}", total=None)
        return pull(
            store, name, lambda _, done, total: bar.update(task, completed=done, total=total)
        )


def _import(store: ModelStore, path: Path, name: str | None) -> ModelManifest:
    path = path.expanduser()
    if path.is_dir():
        return store.import_dir(path, name or path.resolve().name)
    if path.suffix == ".gguf":
        return store.import_gguf(path, name or path.stem)
    raise CommandError(
        Exit.MODEL, f"{path} is neither a folder with OpenVINO IR nor a GGUF file (*.gguf)"
    )


def _export(store: ModelStore, options: argparse.Namespace) -> ModelManifest:
    # Imported here: it loads the inference runtime, which no other action needs.
    from inference.store.export import export_model

    with contextlib.redirect_stdout(sys.stderr):  # the libraries below show progress on stdout
        return export_model(store, options.source, options.weights, options.name)


def _print_list(manifests: list[ModelManifest]) -> None:
    if not manifests:
        print(f"no models; known names: {', '.join(KNOWN)}", file=sys.stderr)
        return
    table = Table(box=None, pad_edge=False)
    for column in ("name", "layers", "context", "MB", "architecture", "digest"):
        table.add_column(column, overflow="fold")
    for one in manifests:
        size = sum(file.size for file in one.files) >> 20
        table.add_row(
            one.name,
            str(one.layers),
            str(one.context_length),
            str(size),
            one.architecture,
            one.digest[:16],
        )
    Console().print(table)
