"""A host whose replicas are processes of their own, one per device: starting, supervising and ending them."""
