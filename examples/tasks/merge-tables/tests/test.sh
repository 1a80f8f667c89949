#!/bin/sh
[ "$(tr -d '\r' < /app/joined.csv 2>/dev/null)" = "$(printf 'person,city\nIda,Turku\nOle,Bergen\nUna,Turku')" ] && r=1 || r=0
echo $r > /logs/verifier/reward.txt
