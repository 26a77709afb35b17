"""Entry point of `gpuagent` and of `python -m gpuagent`."""

import sys

from gpuagent.cli.main import cli


def main() -> None:
    """Run the command line; exits with the code that `gpuagent.cli.exits` documents."""
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding lacks is written escaped: never a reason to fail.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    cli(prog_name="gpuagent")


if __name__ == "__main__":
    main()
