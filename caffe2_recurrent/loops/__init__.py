"""The loops of a net as values: read, found by their outputs, held against shapes."""
