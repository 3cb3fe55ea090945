"""What the tests of the command line share."""

import re

from checkpoint_tools import SHAPES

from jaxserve.cli import main


def flags(folder, hyphens=False):
    options = {f"engine.{name}": value for name, value in {"model": folder, **SHAPES}.items()}
    options |= {"sampling.temperature": 0, "sampling.max_tokens": 8, "sampling.ignore_eos": True}
    spelled = {name.replace("_", "-") if hyphens else name: value for name, value in options.items()}
    return [part for name, value in spelled.items() for part in (f"--{name}", str(value))]


def run(capsys, *arguments):
    """(exit status, stdout, stderr) of the command in this process."""
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def refused(capsys, *arguments, parts, status=2):
    """The command fails with this status and one line on stderr that has all the parts."""
    got, out, err = run(capsys, *arguments)
    assert (got, out) == (status, ""), err
    assert re.fullmatch(r"jaxserve: [^\n]+\n", err), err
    assert [part for part in parts if part not in err] == [], err
