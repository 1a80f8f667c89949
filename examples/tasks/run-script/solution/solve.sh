#!/bin/sh
printf '#!/bin/sh\necho $(($1 * 2))\n' > /app/double
chmod +x /app/double
