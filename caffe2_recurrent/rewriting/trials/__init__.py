"""What takes the least time on this machine, tried out."""
