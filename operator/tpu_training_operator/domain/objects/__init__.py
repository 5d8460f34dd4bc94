"""The Kubernetes objects that a gang consists of."""
