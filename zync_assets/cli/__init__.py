"""The command ``zync``: a module a family of commands."""
