#!/bin/sh
exec python3 -I /tests/check.py
