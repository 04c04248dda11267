"""Entry point of `python -m mlmclm`, the same as the command `mlmclm`."""

from mlmclm.cli.main import main

if __name__ == "__main__":
    main()
