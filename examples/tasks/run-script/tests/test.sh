#!/bin/sh
r=1
for n in 0 7 -4 1000; do
  [ "$($AS_ANSWER /app/double $n 2>/dev/null)" = $((n * 2)) ] || r=0
done
echo $r > /logs/verifier/reward.txt
