"""Answers of every kind as deltas, for the tests of the dialects."""

from mlx_zip.engine import Counts
from mlx_zip.server.answers.turn import Delta, Done, Reasoning, Text, TokenLogprob, ToolCall, Waiting

COUNTS = Counts(prompt_tokens=50, cached_tokens=40, base_tokens=9, steps=5, hypertokens=2, total_s=0.5)
LOGPROB = TokenLogprob("Hé", "Hé".encode(), -0.5, (("Hé", "Hé".encode(), -0.5), ("Ho", b"Ho", -1.25)))
WAITING = Waiting(0, 8, 50, 40)
CALL = ToolCall("call_1", "add", '{"a": 1, "b": [2]}')
OTHER_CALL = ToolCall("call_2", "noop", "{}")

ANSWERS: dict[str, list[Delta]] = {
    "text": [Waiting(0, 0), WAITING, Text("Hé"), Text(" there"), Done("stop", COUNTS)],
    "text with log-probabilities": [WAITING, Text("Hé", (LOGPROB,)), Text("!"), Done("stop", COUNTS)],
    "nothing": [WAITING, Done("stop", COUNTS)],
    "nothing, and no wait": [Done("length", COUNTS)],
    "cut at the limit": [WAITING, Text("Once"), Done("length", COUNTS)],
    "ended by a stop string": [WAITING, Text("Once"), Done("stop", COUNTS, stopped_by="\n\n")],
    "reasoning and text": [WAITING, Reasoning("Let me"), Reasoning(" see."), Text("4"), Done("stop", COUNTS, None, 3)],
    "reasoning cut at the limit": [WAITING, Reasoning("Let me"), Done("length", COUNTS, None, 9)],
    "one call": [WAITING, CALL, Done("tool_calls", COUNTS)],
    "reasoning, text and two calls": [
        Waiting(0, 8),
        Waiting(8, 8),
        Reasoning("Add."),
        Text("I add."),
        CALL,
        OTHER_CALL,
        Done("tool_calls", COUNTS, None, 2),
    ],
    "text after a call": [WAITING, CALL, Text("Done"), Text("."), Done("stop", COUNTS)],
}
BEGINNINGS: dict[str, list[Delta]] = {  # of answers that fail
    "before anything": [],
    "after the prompt": [WAITING],
    "in the text": [WAITING, Text("Once")],
    "in the reasoning": [WAITING, Reasoning("Hm")],
    "after a call": [WAITING, CALL],
}
