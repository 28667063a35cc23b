"""What is there for all steps at once: sequences, states over all steps, masks of lengths."""
