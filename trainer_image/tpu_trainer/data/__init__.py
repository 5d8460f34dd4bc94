"""Which process trains on which example, and in what order."""
