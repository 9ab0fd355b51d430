"""The parser of every command: one line per error, with the word that was probably meant."""

import argparse

import pytest

from mlx_zip import cli
from mlx_zip.arguments import Parser, default_flags


def refused(capsys, *words):
    """What `mlx_zip WORDS` prints on stderr when it ends with status 2."""
    with pytest.raises(SystemExit) as end:
        cli.main(list(words))
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err[:7]) == ("", 1, "error: ")
    return err[7:-1]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("generate --max-tokns 5", "unknown flag --max-tokns; did you mean --max-tokens?"),
        ("generate --modle x", "unknown flag --modle; did you mean --model?"),
        ("generate --nonesuch", "unknown flag --nonesuch; mlx_zip generate --help lists all flags"),
        ("generate hello", "'hello' belongs to no flag (mlx_zip generate --help lists the flags)"),
        ("genrate", "mlx_zip has no command 'genrate'; did you mean generate?"),
        ("vocab pakc", "mlx_zip vocab has no method 'pakc'; did you mean pack?"),
        ("vocab pack lern", "mlx_zip vocab pack has no action 'lern'; did you mean learn?"),
        ("bench generat", "mlx_zip bench has no bench 'generat'; did you mean generate?"),
        ("bench codec --nonesuch", "unknown flag --nonesuch; mlx_zip bench codec --help lists all flags"),
        ("convert --hf-path x --q-mode afine", "--q-mode: 'afine' is not one of affine, mxfp4, nvfp4, mxfp8"),
        ("generate -m x", "--max-tokens/-m: 'x' is not a whole number"),
        ("generate --temp x", "--temp: 'x' is not a number"),
        ("generate --prompt", "--prompt/-p needs a value"),
        ("generate --prompt=--", "--prompt=--: -- cannot be a flag's value"),
        (
            "prepare --separator --- --out o",
            "--separator needs a value; one that begins with - is given as --separator=---",
        ),
        ("prepare --data -a.txt", "--data needs at least one value; one that begins with - is given as --data=-a.txt"),
        ("prepare --out --data x", "--out needs a value"),
        ("convert", "mlx_zip convert needs --hf-path/--model (mlx_zip convert --help shows how)"),
        (
            "convert --hf-pth x",
            "mlx_zip convert needs --hf-path/--model; unknown flag --hf-pth; did you mean --hf-path?",
        ),
        ("vocab", "mlx_zip vocab needs METHOD: pack, multitok, adapt, hbpe (mlx_zip vocab --help shows how)"),
    ],
)
def test_a_wrong_word_is_one_line_that_names_it_and_what_was_meant(words, answer, capsys):
    assert refused(capsys, *words.split()) == answer


def test_an_unknown_command_without_a_like_one_lists_the_commands(capsys):
    assert refused(capsys, "zzz").endswith(f"choose from {', '.join(cli.COMMANDS)}")


def test_a_hidden_flag_is_never_proposed(capsys):
    parser = Parser(prog="x")
    parser.add_argument("--codebook", help=argparse.SUPPRESS)
    with pytest.raises(SystemExit):
        parser.parse_args(["--codebok", "a"])
    assert capsys.readouterr().err == "error: unknown flag --codebok; x --help lists all flags\n"


def test_a_flag_may_be_cut_short_as_in_mlx_lm():
    assert cli.command_parser("generate", "x").parse_args(["--max-tok", "5"]).max_tokens == 5


def test_without_a_command_the_help_is_printed(capsys):
    assert cli.main([]) == 0
    assert capsys.readouterr().out.startswith("usage: mlx_zip [-h] [--version] COMMAND ...")


def test_a_flags_type_and_the_end_of_its_help_follow_from_its_default():
    parser = argparse.ArgumentParser()
    flag = default_flags(parser.add_argument)
    flag("--trials", 5, "number of runs")
    flag("--shares", [0.25, 0.5], "shares to keep", metavar="SHARE")
    flag("--mode", "free", "what is written", choices=("free", "replay"))
    given = parser.parse_args(["--shares", "1", "0.75"])
    assert (given.trials, given.shares, given.mode) == (5, [1.0, 0.75], "free")
    assert parser.parse_args(["--trials", "7"]).trials == 7
    shown = " ".join(parser.format_help().split())
    for end in ("number of runs (default: 5)", "shares to keep (default: 0.25 0.5)", "what is written (default: free)"):
        assert end in shown
