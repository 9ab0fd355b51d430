"""The model and prompt of command-line tests."""

MODEL = "llama_transformer_tied_lora"

PROMPT = "The cat sat on the mat. The cat sat on the mat."
