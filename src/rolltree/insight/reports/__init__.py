"""What the commands that look at stored runs print."""
