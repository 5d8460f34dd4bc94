"""What a run measures of itself, and where that goes: the history file and TensorBoard event files."""
