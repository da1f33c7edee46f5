"""Converting a model from its original weights into OpenVINO IR, in the precision that was asked.

optimum-intel reads the weights (a folder or a hub repository, as transformers loads them) and
writes a stateful graph in fp16; nncf makes integers of the weights. Neither they nor torch are
needed for anything else, so they come with the extra ``export`` and are imported in functions only.

Both libraries have cases in which they leave weights as they were and say so in a log at most.
Here the written graph is read again: unless its matrices have the precision that was asked, the
export has failed and nothing is added to the store.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import openvino as ov

from inference.store.errors import StoreError
from inference.store.manifest import ModelManifest, check_name
from inference.store.store import OPTIONAL, REQUIRED, ModelStore

Weights = Literal["int4", "int8", "fp16"]
Role = Literal["product", "table", "head"]

INSTALL = ".venv/bin/pip install -e '.[export]' in meshnode's folder"
GROUP_SIZES = (128, 64, 32, 16)  # input channels that share a scale in int4
_MODEL = "openvino_model.xml"
_NEEDED = ("torch", "optimum", "optimum.intel", "nncf")
# Element types that count as each precision. The head and the table of embeddings keep 8 bits in
# int4: errors there cost most, and both are looked up by token.
_FOUR, _EIGHT = frozenset({"u4", "i4"}), frozenset({"u8", "i8"})
_PASSED = ("Convert", "Subtract", "Multiply", "Reshape", "Transpose")  # from a weight to its use


@dataclass(frozen=True, slots=True)
class Matrix:
    """A constant that rows are multiplied with (the head: to logits) or that tokens look up.

    ``element`` is the type that it is stored in, ``channels`` what one row of it adds up.
    """

    name: str
    role: Role
    element: str
    channels: int


def export_model(
    store: ModelStore, source: str, weights: Weights, name: str | None = None
) -> ModelManifest:
    """Convert ``source``, a folder or a hub repository, and add it to ``store`` as ``name``.

    Without ``name`` it is called after the source, with the precision behind. Takes minutes and
    memory for the original weights. Code that comes with a model is never run. Raises
    :class:`StoreError`.
    """
    check_source(source)
    name = check_name(name or default_name(source, weights))
    check_installed(_NEEDED)
    with store.adding(name) as incoming:
        if store.has(name):
            raise StoreError(
                f"the store already has a model {name}; remove it or give another name"
            )
        # Beside, as everything in `incoming` goes into the store; `adding` clears such names away.
        scratch = incoming.with_name(f"{incoming.name}.export")
        try:
            _read_original(source, scratch)
            model = ov.Core().read_model(scratch / _MODEL)
            if weights != "fp16":
                _compress(model, source, weights)
                ov.save_model(model, scratch / "compressed.xml", compress_to_fp16=False)
                del model  # it maps the file that is replaced
                for ending in (".xml", ".bin"):
                    (scratch / "compressed").with_suffix(ending).replace(
                        (scratch / _MODEL).with_suffix(ending)
                    )
                model = ov.Core().read_model(scratch / _MODEL)
            check_precision(matrices(model), weights)
            del model
            for file in (*REQUIRED, *OPTIONAL):
                if (scratch / file).is_file():
                    (scratch / file).rename(incoming / file)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return store.add(name, incoming)


def check_source(source: str) -> None:
    """Raise :class:`StoreError` unless ``source`` is a folder of a model or may be a repository."""
    folder = Path(source).expanduser()
    if source and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise StoreError(f"{source} has no config.json: it holds no model for transformers")
        return
    try:
        check_name(source)
    except StoreError:
        raise StoreError(
            f"{source[:200]} is neither a folder nor the name of a hub repository (owner/name)"
        ) from None


def default_name(source: str, weights: Weights) -> str:
    """``SmolLM2-135M-Instruct-int4`` for any way to write that source."""
    folder = Path(source).expanduser()
    last = folder.resolve().name if folder.is_dir() else source.rpartition("/")[2]
    return f"{last}-{weights}"


def check_installed(needed: Sequence[str]) -> None:
    """Raise :class:`StoreError` with what to install when one of these modules is not there."""
    for module in needed:
        try:
            found = find_spec(module) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            raise StoreError(f"exporting needs {module}, which is not installed: {INSTALL}")


def matrices(model: ov.Model) -> list[Matrix]:
    """The weight matrices of a language model, in order of use."""
    head = _head(model)
    found = []
    for node in model.get_ordered_ops():
        kind = node.get_type_name()
        if kind == "MatMul":
            attributes = node.get_attributes()
            for port, transposed in (
                (0, not attributes["transpose_a"]),
                (1, attributes["transpose_b"]),
            ):
                constant = _constant(node.input_value(port).get_node())
                if constant is not None:
                    shape = node.input_value(port).get_partial_shape()
                    channels = int(shape[-1 if transposed else -2].get_length())
                    role: Role = "head" if node.get_friendly_name() == head else "product"
                    found.append(_matrix(constant, role, channels))
        elif kind == "Gather" and _is_of_tokens(node.input_value(1).get_node()):
            constant = _constant(node.input_value(0).get_node())
            if constant is not None:
                channels = int(node.input_value(0).get_partial_shape()[-1].get_length())
                found.append(_matrix(constant, "table", channels))
    return found


def group_size(found: Iterable[Matrix]) -> int:
    """The largest group that divides the channels of every matrix that becomes int4.

    Raises :class:`StoreError` when there is none.
    """
    channels = {matrix.channels for matrix in found if matrix.role == "product"}
    for size in GROUP_SIZES:
        if all(count % size == 0 for count in channels):
            return size
    odd = next(count for count in sorted(channels) if count % GROUP_SIZES[-1])
    raise StoreError(
        f"int4 needs groups of {' or '.join(map(str, GROUP_SIZES))} channels, and one of the "
        f"model's matrices has {odd}: export it as int8"
    )


def check_precision(found: Sequence[Matrix], weights: Weights) -> None:
    """Raise :class:`StoreError` unless the matrices are stored as ``weights`` says."""
    if not any(matrix.role == "product" for matrix in found):
        raise StoreError("the exported graph has no weight matrices: it cannot be checked")
    wrong = [matrix for matrix in found if matrix.element not in _allowed(matrix.role, weights)]
    if wrong:
        raise StoreError(
            f"{len(wrong)} of {len(found)} weight matrices did not become {weights}: "
            f"{wrong[0].name[:120]} is {wrong[0].element}"
        )


def _allowed(role: Role, weights: Weights) -> frozenset[str]:
    if weights == "fp16":
        return frozenset({"f16"})
    if weights == "int8":
        return _EIGHT
    return _FOUR if role == "product" else _FOUR | _EIGHT


def _read_original(source: str, target: Path) -> None:
    """Write graph, tokenizer and configuration to the folder ``target``, weights in fp16."""
    folder = Path(source).expanduser()
    try:
        exporter = import_module("optimum.exporters.openvino")
        settings = import_module("optimum.intel").OVConfig(dtype="fp16")
        exporter.main_export(
            str(folder.resolve()) if folder.is_dir() else source,
            output=target,
            task="text-generation-with-past",
            library_name="transformers",
            ov_config=settings,
            stateful=True,
            convert_tokenizer=True,
            trust_remote_code=False,
        )
    except Exception as error:  # these libraries raise whatever they come across
        raise StoreError(f"cannot export {source}: {_line(error)}") from error
    if not (target / _MODEL).is_file():
        raise StoreError(f"the export of {source} wrote no {_MODEL}")
    if not (target / "openvino_tokenizer.xml").is_file():
        raise StoreError(f"the tokenizer of {source} cannot be converted to OpenVINO")


def _compress(model: ov.Model, source: str, weights: Weights) -> None:
    """Make integers of the weights of ``model``, in place and without calibration data."""
    original = matrices(model)
    grouped = group_size(original) if weights == "int4" else None
    try:
        nncf = import_module("nncf")
        if grouped is None:
            nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
        else:
            mode = nncf.CompressWeightsMode.INT4_ASYM
            nncf.compress_weights(model, mode=mode, ratio=1.0, group_size=grouped)
    except Exception as error:
        raise StoreError(f"cannot make {weights} of {source}: {_line(error)}") from error


def _head(model: ov.Model) -> str:
    """The product that gives the logits."""
    node = model.get_results()[0].input_value(0).get_node()
    while node.get_type_name() != "MatMul" and node.get_input_size():
        node = node.input_value(0).get_node()
    return str(node.get_friendly_name())


def _constant(node: ov.Node) -> ov.Node | None:
    """The stored matrix behind an input of a product; None when it is computed, or a vector."""
    while node.get_type_name() in _PASSED:
        node = node.input_value(0).get_node()
    if node.get_type_name() != "Constant":
        return None
    long = [size for size in node.get_output_shape(0) if size > 1]
    return node if len(long) >= 2 else None


def _is_of_tokens(node: ov.Node) -> bool:
    while node.get_type_name() in ("Convert", "Reshape", "Unsqueeze"):
        node = node.input_value(0).get_node()
    return node.get_type_name() == "Parameter" and "input_ids" in node.output(0).get_names()


def _matrix(constant: ov.Node, role: Role, channels: int) -> Matrix:
    element = constant.get_output_element_type(0).get_type_name()
    return Matrix(constant.get_friendly_name(), role, element, channels)


def _line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:500] if text else type(error).__name__
