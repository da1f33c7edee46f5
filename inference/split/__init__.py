"""Cut a stateful OpenVINO language model into stages, by topology.

``read_splittable(path)`` finds the decoder layers of a model or says why it has none that can be
told apart; ``.write(first, last, directory)`` puts a stage on disk, byte-identical wherever it is
done.
"""

from inference.split.build import HIDDEN_INPUT, HIDDEN_OUTPUT, STAGE_INFO
from inference.split.errors import SplitError, SplitReason
from inference.split.write import STAGE_FILE, Splittable, StageFiles, read_splittable

__all__ = [
    "HIDDEN_INPUT",
    "HIDDEN_OUTPUT",
    "STAGE_FILE",
    "STAGE_INFO",
    "SplitError",
    "SplitReason",
    "Splittable",
    "StageFiles",
    "read_splittable",
]
