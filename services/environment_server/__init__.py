"""The environment server: hosts gymnasium and text environments, many episodes at once, over HTTP."""
