"""The parts of one answer that all dialects share: the turn, its deltas, reasoning, tool calls, and grammars."""
