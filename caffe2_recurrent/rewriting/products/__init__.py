"""Products with weights, in steps and over all of them, and the ways to have one."""
