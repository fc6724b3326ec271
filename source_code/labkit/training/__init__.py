"""What is trained, on what, and what is kept of it."""
