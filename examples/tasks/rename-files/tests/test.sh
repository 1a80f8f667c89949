#!/bin/sh
[ "$(ls /app/notes 2>/dev/null | tr '\n' ' ')" = 'a.txt b.txt keep.md ' ] && r=1 || r=0
echo $r > /logs/verifier/reward.txt
