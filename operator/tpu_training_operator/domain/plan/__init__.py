"""The life of a job: the planner, and each decision it makes."""
