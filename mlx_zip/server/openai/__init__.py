"""OpenAI's APIs: chat completions, completions of plain text, and Responses."""
