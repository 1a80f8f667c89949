#!/bin/sh
mkdir -p /logs/verifier
if [ "$(cat /app/rainbow.txt 2>/dev/null)" = "$(printf 'red\ngreen\nblue')" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
