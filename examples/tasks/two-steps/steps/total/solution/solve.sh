#!/bin/sh
cat /app/squares.txt /app/more.txt | awk '{sum += $1} END {print sum}' > /app/total.txt
