"""What the user brings: the task, its hooks, and what it logs."""
