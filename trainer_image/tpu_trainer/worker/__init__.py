"""The worker's processes: one per host, and one per replica."""
