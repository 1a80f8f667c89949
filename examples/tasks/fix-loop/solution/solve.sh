#!/bin/sh
sed -i 's/range(1, last)/range(1, last + 1)/' /app/squares.py
