"""Looking into the steps of a loop: what they computed, and how long each of their operators took."""
