"""What all APIs of the server share to make an answer: turns, deltas, reasoning, tool calls, and grammars."""
