#!/bin/sh
seq 10 | awk '{print $1 * $1}' > /app/squares.txt
