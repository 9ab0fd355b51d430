"""Reads a message, does what it says or asks the model, and begins again."""

from __future__ import annotations

from mlx_zip.cli.chat import commands
from mlx_zip.cli.chat.program import Program
from mlx_zip.errors import EngineStoppedError, MlxZipError, PromptTooLongError


def run(program: Program) -> int:
    """Chats until the user ends it; returns 0, or 1 if the engine has stopped.

    A person can still save the conversation then; without one, the chat ends at once.
    """
    while not program.ended and (text := program.front.read()) is not None:
        try:
            _do(program, text)
        except EngineStoppedError as error:
            program.front.fail(f"{error}; /save keeps the conversation, /quit ends the chat")
            program.ended = not program.front.asks
        except MlxZipError as error:
            program.front.fail(_advised(error))
    return 0 if program.engine.alive else 1


def _do(program: Program, text: str) -> None:
    """Runs a command, or asks the model. Raises `MlxZipError`."""
    if not text.strip():
        return
    found = commands.find(text)
    if found is None:
        program.ask(text[1:] if text.startswith("//") else text)
    else:
        command, argument = found
        command.do(program, argument)


def _advised(error: MlxZipError) -> str:
    """Returns an error's message, with what to do if the conversation is too long."""
    more = "; /reset begins a new conversation" if isinstance(error, PromptTooLongError) else ""
    return f"{error}{more}"
