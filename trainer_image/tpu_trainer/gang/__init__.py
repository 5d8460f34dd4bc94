"""The replicas of a job as one: backends, and the one exchange of a step."""
