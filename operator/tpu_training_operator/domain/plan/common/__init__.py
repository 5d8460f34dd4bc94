"""What every decision about a job needs: one look at it, its conditions, its accounts."""
