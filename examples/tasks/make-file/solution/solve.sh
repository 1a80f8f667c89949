#!/bin/sh
printf 'red\ngreen\nblue\n' > /app/rainbow.txt
