"""Processes: command line, configuration files, supervision, progress."""
