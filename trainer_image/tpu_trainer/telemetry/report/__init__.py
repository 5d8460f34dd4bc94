"""The report page: one HTML file that says how a run went. Pure functions from a recorded history to text.

`page` is the entrance; `charts` says what is drawn and `plot` how; `axis` and `words` turn numbers into places and
text.
"""
