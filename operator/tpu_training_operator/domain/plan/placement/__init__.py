"""Which of its slices a job runs on, and when it moves."""
