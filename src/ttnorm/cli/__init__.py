"""The command line: its commands by name, and how errors are told.

Commands are functions of the modules beside this one: they parse, call one function, print. What
only one of them needs is imported inside it, so that the others start fast; the names that a help
text lists are not, for importing them takes next to no time.
"""

from __future__ import annotations

import sys

try:
    import typer
    from rich.console import Console
    from rich.text import Text
except ImportError as error:  # the library itself needs neither
    sys.exit(f"The command line needs more than the library: pip install 'ttnorm[bench]' ({error})")

from . import alpha_files, demo, evaluate, post_train, reproduce, train

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Test-time normalization: networks with BatchNorm that adapt in a plain forward.",
)
app.command("reproduce")(reproduce.reproduce)
app.command("train-source")(train.train_source)
app.command("train-segmentation")(train.train_segmentation)
app.command("post-train")(post_train.post_train)
app.command("corrupt")(evaluate.corrupt)
app.command("evaluate")(evaluate.evaluate)
app.command("report")(evaluate.report)
app.command("info")(alpha_files.info)
app.command("export")(alpha_files.export)
app.command("demo")(demo.demo)


def main() -> None:
    """Run the command line.

    What ttnorm itself refuses is said in one line; an error in anybody else's code, such as the
    user's own network, keeps its traceback.
    """
    try:
        app()
    except (ValueError, TypeError, FileNotFoundError) as error:
        if not _raised_by_us(error):
            raise
        message = Text(f"error: {error}", style="red")
        Console(stderr=True, soft_wrap=True).print(message)
        sys.exit(2)


def _raised_by_us(error: Exception) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals["__name__"].split(".")[0] == "ttnorm"
