"""How fast this trainer's loop is beside others, and what its parts cost: `python -m bench.trainer`."""
