"""`make demo`: converts a checkpoint, runs it, compares it with the published package, and prints a story.

The checkpoint is a test fixture in the published layout (format 2) with random weights, so the generated text is noise.
The exit status is 0 if every id equals the id that zip2zip 0.2.0 chose on PyTorch, else 1.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

from mlx_zip.device import disable_tf32, set_device_from_environment
from mlx_zip.errors import ModelError
from mlx_zip.named import DEFAULT, MAX_TOKENS, PROMPT, bundled_model_folder

CHECKPOINT = Path(str(files("mlx_zip.golden"))) / "models/phi3_reslatent_mean_untied_v2"


def main() -> int:
    """Runs the demo; returns 0 if all ids equal the recorded ones, else 1."""
    disable_tf32()  # the recorded ids were computed in float32; must be called before MLX is imported
    set_device_from_environment()
    expected = json.loads((CHECKPOINT / "expected.json").read_text(encoding="utf-8"))
    prompts = expected["prompts"]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "demo-model"
        print_line("1. Convert a zip2zip checkpoint (a tiny Phi-3 with random weights) to an mlx-lm model folder.")
        run_command("convert", "--hf-path", CHECKPOINT, "--mlx-path", model)
        print_line(
            "\n2. Generate from it. Random weights, so the text is noise; in a terminal its hypertokens are coloured."
        )
        prompt = beginning_of_text() + prompts[0]["text"]
        run_command("generate", "--model", model, "--ignore-chat-template", "--max-tokens", 80, "--prompt", prompt)
        print_line(
            f"\n3. Compare with the greedy ids recorded from zip2zip {expected['versions']['zip2zip']} on PyTorch."
        )
        status = compare_steps(model, prompts)
    tell_story()
    return status


def beginning_of_text() -> str:
    """Returns the token that begins the recorded prompts; the checkpoint's tokenizer does not add it."""
    return json.loads((CHECKPOINT / "tokenizer_config.json").read_text(encoding="utf-8"))["bos_token"]


def print_line(line: str) -> None:
    """Prints a line and flushes, so that it appears before the output of the next command."""
    print(line, flush=True)


def run_command(*arguments: object) -> None:
    """Prints a `mlx_zip` command as a user would type it, and runs it."""
    words = [str(argument) for argument in arguments]
    print_line("$ " + shlex.join(["mlx_zip", *words]))
    subprocess.run([sys.executable, "-m", "mlx_zip", *words], check=True)


def compare_steps(model_folder: Path, prompts: list[dict[str, Any]]) -> int:
    """Generates from the recorded prompts and counts equal ids; returns 0 if all are equal, else 1."""
    from mlx_zip.engine.mlx.generate import load, stream_generate

    model, tokenizer = load(str(model_folder))
    equal = total = 0
    for prompt in prompts:
        wanted = prompt["generated_ids"]
        steps = stream_generate(model, tokenizer, prompt["base_ids"], max_tokens=10 * len(wanted))
        found = [step.token for step in islice(steps, len(wanted))]
        same = sum(a == b for a, b in zip(found, wanted, strict=False))
        print_line(f"   {same} of {len(wanted)} ids equal after {' '.join(prompt['text'].split())[:60]!r}")
        equal, total = equal + same, total + len(wanted)
    print_line(f"   {equal} of {total} ids equal those of the published package.")
    return 0 if equal == total else 1


def tell_story() -> None:
    """Prints a story with coloured hypertokens, or why the bundled model cannot be used."""
    print_line("\n4. A story by the bundled model, which was trained to use hypertokens.")
    try:
        bundled_model_folder(DEFAULT)
    except ModelError as error:
        print_line(f"   No story: {error}")
        return
    colour = "never" if os.environ.get("NO_COLOR") else "always"
    if colour == "always":
        print_line(
            "   In colour: \x1b[36mtwo\x1b[0m, \x1b[32mthree\x1b[0m or \x1b[33mfour\x1b[0m base tokens of one step."
        )
    run_command("generate", "--color", colour, "--prompt", PROMPT, "--max-tokens", MAX_TOKENS)


if __name__ == "__main__":
    sys.exit(main())
