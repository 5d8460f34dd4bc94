"""What a worker's failure means, and which worker failed first."""
