"""The recipe: scaled to the job's slice, explained, and checked before chips are paid for."""
