"""What the operator costs at every size, beside a bare client, an Indexed Job and JobSet: `python -m bench.scale`."""
