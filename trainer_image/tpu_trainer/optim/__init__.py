"""From averaged gradients to new parameters: optimizer, schedule, precision, sharding."""
