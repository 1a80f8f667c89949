#!/bin/sh
cd /app && sh make.sh && cd repository && git log --reverse -S lantern --format=%s -- story.txt | head -1 > /app/answer.txt
