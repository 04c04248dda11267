"""`python -m mlmclm` is the command `mlmclm`."""

from mlmclm.cli.main import main

if __name__ == "__main__":
    main()
