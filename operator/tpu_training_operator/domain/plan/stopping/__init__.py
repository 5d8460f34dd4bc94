"""How a gang stops without a failure."""
