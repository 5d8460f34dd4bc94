"""What the operator costs at every size, beside a bare client and a plain Indexed Job: `python -m bench.scale`."""
