#!/bin/sh
[ "$(cat /app/sorted.txt 2>/dev/null)" = "$(printf 'Ada\nBo\nKim\nZoe')" ] && r=1 || r=0
echo $r > /logs/verifier/reward.txt
