#!/bin/sh
python3 -c "import json; print(sum(b['amount'] for b in json.load(open('/app/bills.json')) if not b['paid']))" > /app/open.txt
