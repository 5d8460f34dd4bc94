"""What is checked before a job asks for its slice."""
