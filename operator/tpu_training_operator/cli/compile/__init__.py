"""The command compile-check."""
