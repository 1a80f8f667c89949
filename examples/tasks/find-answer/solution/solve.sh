#!/bin/sh
awk -F, 'NR > 1 {sum[$1] += $3} END {for (boat in sum) if (best == "" || sum[boat] > sum[best]) best = boat; print best, sum[best]}' /app/trips.csv > /app/answer.txt
