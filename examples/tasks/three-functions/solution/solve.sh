#!/bin/sh
cat > /app/text.py <<'END'
def shout(text):
    return text.upper()


def back(text):
    return text[::-1]


def vowels(text):
    return sum(text.count(letter) for letter in "aeiou")
END
