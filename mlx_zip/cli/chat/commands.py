"""The loop of a chat, and the chat's commands: a message that begins with a slash is a command."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

from mlx_zip.arguments import suggest_nearest
from mlx_zip.cli.chat.conversation import Conversation, hypertoken_use_lines
from mlx_zip.cli.chat.program import NONE, OWN, Program
from mlx_zip.errors import EngineStoppedError, GenerationError, MlxZipError, PromptTooLongError, errors_as


def run_chat_loop(program: Program) -> int:
    """Chats until the user ends the chat; returns 0, or 1 if the engine has stopped.

    If the engine stops, an interactive chat goes on, so that its conversation can be saved; any other chat ends.
    """
    while not program.ended and (text := program.front.read_message()) is not None:
        try:
            _run_command_or_ask(program, text)
        except EngineStoppedError as error:
            program.front.show_error(f"{error}; /save keeps the conversation, /quit ends the chat")
            program.ended = not program.front.is_interactive
        except MlxZipError as error:
            advice = "; /reset begins a new conversation" if isinstance(error, PromptTooLongError) else ""
            program.front.show_error(f"{error}{advice}")
    return 0 if program.engine.alive else 1


def _run_command_or_ask(program: Program, text: str) -> None:
    if not text.strip():
        return
    found = find_command(text)
    if found is None:
        program.ask(text[1:] if text.startswith("//") else text)
    else:
        command, argument = found
        command.run(program, argument)


class Command(NamedTuple):
    """A command of the chat. argument, purpose: texts for /help. takes_path: whether the argument is a file name."""

    argument: str
    purpose: str
    run: Callable[[Program, str], None]
    takes_path: bool = False


def find_command(text: str) -> tuple[Command, str] | None:
    """Returns the command in a message, and the command's argument; None if the message is for the model.

    A message that begins with two slashes is for the model. Raises `GenerationError` if the command is unknown; the
    message suggests a similar one.
    """
    if not text.startswith("/") or text.startswith("//"):
        return None
    word, _, argument = text[1:].partition(" ")
    name = ALIASES.get(word.strip(), word.strip())
    if name not in COMMANDS:
        hint = suggest_nearest(f"/{name}", [f"/{one}" for one in COMMANDS]) or "/help lists the commands"
        raise GenerationError(f"there is no command /{name:.40}; {hint}")
    return COMMANDS[name], argument.strip()


def _set_system_message(program: Program, text: str) -> None:
    talk = program.conversation
    if not text:
        program.front.show_line(f"system message: {talk.system}" if talk.system else "there is no system message")
        return
    system = None if text == "off" else text
    program.check_system_prompt(system)
    talk.system = system
    program.front.show_line("the system message is " + ("gone" if talk.system is None else "set"))


def _reset_conversation(program: Program, _: str) -> None:
    program.conversation = Conversation(program.conversation.system)
    program.front.show_line("a new conversation begins")


def _retry_message(program: Program, given: str) -> None:
    try:
        temp = float(given) if given else None
    except ValueError:
        raise GenerationError(f"/retry {given:.40}: a temperature is a number, for example 0.7") from None
    if program.conversation.asked is None:
        raise GenerationError("/retry: nothing was asked yet")
    program.retry(temp)


def _save_conversation(program: Program, name: str) -> None:
    if not program.conversation.messages:
        raise GenerationError("/save: nothing was said yet")
    program.front.show_line(f"saved in {program.conversation.save(_parse_file_name('save', name))}")


def _load_conversation(program: Program, name: str) -> None:
    talk = Conversation.load(_parse_file_name("load", name))
    program.check_system_prompt(talk.system)
    program.conversation = talk
    program.front.show_conversation(talk)


def _show_stats(program: Program, _: str) -> None:
    for line in program.totals.summary_lines():
        program.front.show_line(line)


def _show_vocabulary(program: Program, _: str) -> None:
    if not program.engine.info.codebook_size:
        raise GenerationError("/vocabulary: this model has no hypertokens")
    for line in hypertoken_use_lines(list(chain.from_iterable(program.conversation.uses)), program.engine.tokenizer):
        program.front.show_line(line)


def _choose_pack(program: Program, given: str) -> None:
    if given:
        program.choose_pack(_split_command_argument("pack", given))
    program.front.show_line(program.describe_start_pack())


def _switch_colours(program: Program, given: str) -> None:
    if given not in ("", "on", "off"):
        raise GenerationError(f"/colours {given:.40}: give on, off or nothing")
    program.front.colours = not program.front.colours if not given else given == "on"
    program.front.show_line("hypertokens are coloured" if program.front.colours else "hypertokens are not coloured")


def _show_help(program: Program, _: str) -> None:
    left = [f"/{name} {command.argument}".strip() for name, command in COMMANDS.items()]
    for usage, command in zip(left, COMMANDS.values(), strict=True):
        program.front.show_line(f"{usage:{max(map(len, left))}}  {command.purpose}")
    for line in program.front.key_help:
        program.front.show_line(line)


def _end_chat(program: Program, _: str) -> None:
    program.ended = True


def _split_command_argument(name: str, given: str) -> list[str]:
    with errors_as(GenerationError, f"/{name}", ValueError):
        return shlex.split(given)


def _parse_file_name(name: str, given: str) -> str:
    words = _split_command_argument(name, given)
    if len(words) != 1:
        raise GenerationError(f"/{name} needs the name of one file")
    return words[0]


COMMANDS = {
    "system": Command("TEXT", "set the system message; off removes it; without TEXT show it", _set_system_message),
    "reset": Command("", "begin a new conversation; the system message stays", _reset_conversation),
    "retry": Command("TEMP", "ask the last message again, at another temperature if TEMP is given", _retry_message),
    "save": Command("FILE", "write the conversation to a .jsonl file", _save_conversation, True),
    "load": Command("FILE", "go on with the conversation in a .jsonl file", _load_conversation, True),
    "stats": Command("", "show base tokens per step, steps saved, codebook, KV cache and cached tokens", _show_stats),
    "vocabulary": Command("", "show the hypertokens that this conversation's answers have used most", _show_vocabulary),
    "pack": Command(
        "FILE", f"choose the packs that codebooks begin with, {OWN} or {NONE}; show them", _choose_pack, True
    ),
    "colours": Command("on|off", "colour hypertokens by their length, or not", _switch_colours),
    "help": Command("", "show this", _show_help),
    "quit": Command("", "end the chat", _end_chat),
}
ALIASES = {"colors": "colours", "exit": "quit", "q": "quit", "?": "help"}
