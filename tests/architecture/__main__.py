"""Figures of the architecture: `python -m tests.architecture walk`."""

import json
from typing import Annotated

import typer

from tests.architecture.walk import LIMITS, excesses, measure

app = typer.Typer()


@app.callback()
def figures() -> None:
    """Print figures of the architecture."""


@app.command()
def walk(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Only compare those of the library with their limits.")
    ] = False,
    places: Annotated[str, typer.Option(help="Print the functions that this operation passes.")] = "",
) -> None:
    """Print how many files and functions operations pass, and how often they climb."""
    measured = measure(library_only=check)
    if check:
        raise SystemExit("\n".join(excesses(measured)) or 0)
    if places:
        print("\n".join(measured[places].places))
    elif as_json:
        print(json.dumps({name: each.walk._asdict() for name, each in measured.items()}, indent=1))
    else:
        print(f"{'operation':<32}{'files':>16}{'functions':>16}{'climbs':>16}")
        for name, each in measured.items():
            limits = LIMITS[name]
            print(
                f"{name:<32}"
                + "".join(f"{f'{n} of {m}':>16}" for n, m in zip(each.walk, limits, strict=True))
            )


if __name__ == "__main__":
    app()
