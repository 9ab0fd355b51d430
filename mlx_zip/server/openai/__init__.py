"""OpenAI's dialect: chat completions, completions of plain text, and Responses."""
