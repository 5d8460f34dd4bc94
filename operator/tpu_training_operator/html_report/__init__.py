"""The report page: one HTML file about a training, made from the history that its trainer wrote."""
