"""The lake: Delta tables and their files. Nothing above this folder knows Delta."""
