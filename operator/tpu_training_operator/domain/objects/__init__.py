"""The Kubernetes objects of one gang: what the job asks for, as manifests."""
