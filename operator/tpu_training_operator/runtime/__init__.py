"""Acting on a cluster: read the truth, ask the planner, carry out the plan, write the status once."""
