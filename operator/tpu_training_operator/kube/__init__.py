"""One client for the Kubernetes API, used by the operator and by the command line."""
