"""Run the command line by `python -m dflash_fn`."""

from dflash_fn.cli.main import run

if __name__ == "__main__":
    run()
