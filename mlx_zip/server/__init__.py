"""The HTTP server: a core and three APIs (OpenAI chat and completions, OpenAI Responses, Anthropic Messages)."""
