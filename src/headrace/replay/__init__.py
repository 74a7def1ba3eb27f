"""What is kept of the past, to learn from again."""
