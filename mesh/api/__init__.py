"""HTTP on every node: the OpenAI API and the node's own endpoints."""

from mesh.api.app import create_app
from mesh.api.ports import AnswerEvent, Completed, Health, ModelInfo, Node, Started
from mesh.api.server import BindError, open_listeners, serve

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
