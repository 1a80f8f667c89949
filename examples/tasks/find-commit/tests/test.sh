#!/bin/sh
[ "$(cat /app/answer.txt 2>/dev/null)" = 'Evening comes' ] && r=1 || r=0
echo $r > /logs/verifier/reward.txt
