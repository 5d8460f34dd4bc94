"""A job on this machine: an object store and a kubelet for processes behind the same `Cluster` protocol."""
