"""What rules have to know of the operators of a step."""
