"""What went wrong with a worker, and which worker failed first."""
