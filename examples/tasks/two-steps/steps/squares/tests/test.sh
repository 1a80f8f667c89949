#!/bin/sh
mkdir -p /logs/verifier
seq 10 | awk '{print $1 * $1}' | cmp -s - /app/squares.txt && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
