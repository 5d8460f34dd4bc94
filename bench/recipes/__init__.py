"""Whether a scaled recipe still trains: every rule of `recipe.scaling` at every factor: `python -m bench.recipes`."""
