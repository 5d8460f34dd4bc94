"""What a run measures of itself, and where that goes: TensorBoard event files and the report page."""
