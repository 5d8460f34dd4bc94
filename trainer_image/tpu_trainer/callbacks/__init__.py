"""Connects the user's own training loop (`trainer.command`) with the operator: reports, and requests to stop.

`session` is for plain loops; `huggingface` and `lightning` hold callbacks for these trainers. Outside of a
TPUTrainingJob every call does nothing, so the same script runs on a laptop. Importing this package imports no torch.
"""

from tpu_trainer.callbacks.session import Session, session

__all__ = ["Session", "session"]
