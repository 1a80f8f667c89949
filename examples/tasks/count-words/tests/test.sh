#!/bin/sh
[ "$(tr -d ' \n' < /app/count.txt 2>/dev/null)" = 11 ] && r=1 || r=0
echo $r > /logs/verifier/reward.txt
