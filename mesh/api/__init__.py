"""HTTP on every node: the OpenAI API and the node's own endpoints."""

from mesh.api.app import create_app
from mesh.api.ports import Health, ModelInfo, Node
from mesh.api.server import BindError, open_listeners, serve
from mesh.forward.events import AnswerEvent, Completed, Started

__all__ = [
    "AnswerEvent",
    "BindError",
    "Completed",
    "Health",
    "ModelInfo",
    "Node",
    "Started",
    "create_app",
    "open_listeners",
    "serve",
]
