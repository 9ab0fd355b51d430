"""What one answer is made of, in every dialect: a turn, its deltas, reasoning, calls of tools, and grammars."""
