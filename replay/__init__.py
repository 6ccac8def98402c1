"""The `steplog replay` commands on the stored log: a folder each, with the entry point in `command.py`.

`dataset/` has the row format that export and import share, `settings.py` the settings of all commands.
"""
