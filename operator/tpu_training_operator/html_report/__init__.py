"""The report page: one HTML file that says how a training went, made from the history that its trainer wrote."""
