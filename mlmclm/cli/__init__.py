"""The command line, one file per command: parse the options, call the library, print.

Modules that need torch or Ray are imported inside the functions, so that `mlmclm --help` doesn't wait for them.
"""
