"""What a training loop of the user's own (`trainer.command`) tells the operator, and hears from it.

`session` is for plain loops; `huggingface` and `lightning` hold callbacks for these trainers. Outside of a
TPUTrainingJob every call does nothing, so the same script runs on a laptop. Importing this package imports no torch.
"""

from tpu_trainer.callbacks.session import Session, session

__all__ = ["Session", "session"]
