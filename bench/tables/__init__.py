"""Tables of the documentation, made from the records."""
