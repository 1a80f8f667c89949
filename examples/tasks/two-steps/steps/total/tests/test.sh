#!/bin/sh
mkdir -p /logs/verifier
[ "$(cat /app/total.txt 2>/dev/null)" = 400 ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
