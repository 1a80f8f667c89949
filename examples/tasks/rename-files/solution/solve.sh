#!/bin/sh
cd /app/notes && for f in *.text; do mv "$f" "${f%.text}.txt"; done
