"""The HTTP server: one core and three dialects (OpenAI chat and completions, OpenAI Responses, Anthropic Messages)."""
