"""Checkpoints on disk: validated opening, lazy reading, streaming atomic writing, families, manifests."""

from .errors import SutureError, did_you_mean
from .header import TensorInfo
from .reader import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "SutureError", "TensorInfo", "did_you_mean", "open_checkpoint"]
