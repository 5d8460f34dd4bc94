"""The entry check: builds the task with the numbers of the slice, and takes one step without TPUs."""
