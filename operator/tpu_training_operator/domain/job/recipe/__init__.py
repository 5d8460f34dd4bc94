"""What a job resolves to: its slice, its scaled recipe, and what should be known before chips are paid for."""
