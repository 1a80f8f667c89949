#!/bin/sh
mkdir -p /logs/verifier
read -r boat number rest < /app/answer.txt 2>/dev/null
[ "$boat $number$rest" = 'Heron 82' ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
