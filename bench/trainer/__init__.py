"""How fast this trainer's loop is compared with others, and what its parts cost: `python -m bench.trainer`."""
