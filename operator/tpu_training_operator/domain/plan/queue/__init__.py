"""A job whose chips Kueue admits."""
