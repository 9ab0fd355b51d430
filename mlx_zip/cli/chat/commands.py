"""The loop of a chat and its commands: a message is for the model unless it begins with a slash."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

from mlx_zip.arguments import nearest
from mlx_zip.cli.chat.conversation import Conversation, vocabulary_lines
from mlx_zip.cli.chat.program import NONE, OWN, Program
from mlx_zip.errors import EngineStoppedError, GenerationError, MlxZipError, PromptTooLongError


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
    found = find(text)
    if found is None:
        program.ask(text[1:] if text.startswith("//") else text)
    else:
        command, argument = found
        command.do(program, argument)


def _advised(error: MlxZipError) -> str:
    """Returns an error's message, with what to do if the conversation is too long."""
    more = "; /reset begins a new conversation" if isinstance(error, PromptTooLongError) else ""
    return f"{error}{more}"


class Command(NamedTuple):
    """What a command takes, does in words, and does. takes_path: whether its argument is the name of a file."""

    argument: str
    purpose: str
    do: Callable[[Program, str], None]
    takes_path: bool = False


def find(text: str) -> tuple[Command, str] | None:
    """Returns the command that a message is, and its argument; None if the message is for the model.

    Two slashes at the beginning stand for one, which is no command's. Raises `GenerationError` with the
    commands that were probably meant.
    """
    if not text.startswith("/") or text.startswith("//"):
        return None
    word, _, argument = text[1:].partition(" ")
    name = ALIASES.get(word.strip(), word.strip())
    if name not in COMMANDS:
        hint = nearest(f"/{name}", [f"/{one}" for one in COMMANDS]) or "/help lists the commands"
        raise GenerationError(f"there is no command /{name:.40}; {hint}")
    return COMMANDS[name], argument.strip()


def _system(program: Program, text: str) -> None:
    talk = program.talk
    if not text:
        program.front.say(f"system message: {talk.system}" if talk.system else "there is no system message")
        return
    system = None if text == "off" else text
    program.check_system(system)
    talk.system = system
    program.front.say("the system message is " + ("gone" if talk.system is None else "set"))


def _reset(program: Program, _: str) -> None:
    program.talk = Conversation(program.talk.system)
    program.front.say("a new conversation begins")


def _retry(program: Program, given: str) -> None:
    try:
        temp = float(given) if given else None
    except ValueError:
        raise GenerationError(f"/retry {given:.40}: a temperature is a number, for example 0.7") from None
    if program.talk.asked is None:
        raise GenerationError("/retry: nothing was asked yet")
    program.retry(temp)


def _save(program: Program, name: str) -> None:
    if not program.talk.messages:
        raise GenerationError("/save: nothing was said yet")
    program.front.say(f"saved in {program.talk.save(_file('save', name))}")


def _load(program: Program, name: str) -> None:
    talk = Conversation.load(_file("load", name))
    program.check_system(talk.system)
    program.talk = talk
    program.front.show_conversation(talk)


def _stats(program: Program, _: str) -> None:
    for line in program.totals.lines():
        program.front.say(line)


def _vocabulary(program: Program, _: str) -> None:
    if not program.engine.info.codebook_size:
        raise GenerationError("/vocabulary: this model has no hypertokens")
    for line in vocabulary_lines(list(chain.from_iterable(program.talk.uses)), program.engine.tokenizer):
        program.front.say(line)


def _pack(program: Program, given: str) -> None:
    if given:
        program.choose_pack(_words("pack", given))
    program.front.say(program.pack_line())


def _colours(program: Program, given: str) -> None:
    if given not in ("", "on", "off"):
        raise GenerationError(f"/colours {given:.40}: give on, off or nothing")
    program.front.colours = not program.front.colours if not given else given == "on"
    program.front.say("hypertokens are coloured" if program.front.colours else "hypertokens are not coloured")


def _help(program: Program, _: str) -> None:
    left = [f"/{name} {command.argument}".strip() for name, command in COMMANDS.items()]
    for usage, command in zip(left, COMMANDS.values(), strict=True):
        program.front.say(f"{usage:{max(map(len, left))}}  {command.purpose}")
    for line in program.front.keys:
        program.front.say(line)


def _quit(program: Program, _: str) -> None:
    program.ended = True


def _words(name: str, given: str) -> list[str]:
    try:
        return shlex.split(given)
    except ValueError as error:
        raise GenerationError(f"/{name}: {error}") from error


def _file(name: str, given: str) -> str:
    words = _words(name, given)
    if len(words) != 1:
        raise GenerationError(f"/{name} needs the name of one file")
    return words[0]


COMMANDS = {
    "system": Command("TEXT", "set the system message; off removes it; without TEXT show it", _system),
    "reset": Command("", "begin a new conversation; the system message stays", _reset),
    "retry": Command("TEMP", "ask the last message again, at another temperature if TEMP is given", _retry),
    "save": Command("FILE", "write the conversation to a .jsonl file", _save, True),
    "load": Command("FILE", "go on with the conversation in a .jsonl file", _load, True),
    "stats": Command("", "show base tokens per step, steps saved, codebook, KV cache and cached tokens", _stats),
    "vocabulary": Command("", "show the hypertokens that this conversation's answers have used most", _vocabulary),
    "pack": Command("FILE", f"choose the packs that codebooks begin with, {OWN} or {NONE}; show them", _pack, True),
    "colours": Command("on|off", "colour hypertokens by their length, or not", _colours),
    "help": Command("", "show this", _help),
    "quit": Command("", "end the chat", _quit),
}
ALIASES = {"colors": "colours", "exit": "quit", "q": "quit", "?": "help"}
