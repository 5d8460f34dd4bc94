"""How the operator hears of a run while it runs: reports over HTTPS, from a thread of their own."""
