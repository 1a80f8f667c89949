#!/bin/sh
[ "$(cat /app/open.txt 2>/dev/null)" = 57 ] && r=1 || r=0
echo $r > /logs/verifier/reward.txt
