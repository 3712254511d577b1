"""DeepSeek-V4 on the operations of `kernels`."""

from services.worker.model.model import Model, Progress
from services.worker.model.precision import EXACT, QUANTISED, Precision
from services.worker.model.state import LayerState, SegmentState, SequenceState

__all__ = ["EXACT", "QUANTISED", "LayerState", "Model", "Precision", "Progress", "SegmentState", "SequenceState"]
