"""The backward step of a step net, derived: recipe in `derivation.py`, one idea a file."""
