"""The training loop, from the built task to its last checkpoint; start reading at `loop.py`."""
