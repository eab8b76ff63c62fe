"""What is a workshop around the trainer. Nothing that trains imports it."""
