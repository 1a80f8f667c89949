#!/bin/sh
wc -w < /app/text.txt > /app/count.txt
